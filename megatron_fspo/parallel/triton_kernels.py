# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The two kernels of :mod:`~megatron_fspo.parallel.triton_head`, which documents their arguments.

h [n, H] and w [V, H] are contiguous tensors, or descriptors of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# These differ between micro-batches, so do not compile for their values.
_ANY = ["n", "tiles", "kept_rows"]


@triton.jit(do_not_specialize=_ANY)
def forward_kernel(
    h,
    w,
    labels,
    table,
    kept,
    tops,
    n,
    width,
    scale,
    tiles,
    kept_columns,
    hidden_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
    descriptors: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute the statistics of a row tile over one split of the vocabulary.

    The binary is the same whether values are kept or not, so that a pass without gradients is bit-identical.
    """
    i, split = _place(tl.cdiv(n, block_m), tl.cdiv(width, block_n * tiles), group_m)
    row = i * block_m
    rows = row + tl.arange(0, block_m)
    inside = rows < n
    own = tl.load(labels + rows, mask=inside, other=-1)
    own = tl.where(own < width, own, -1).to(tl.int32)
    top = tl.full([block_m], -1e30, tl.float32)
    total = tl.zeros([block_m], tl.float32)
    weighted = tl.zeros([block_m], tl.float32)
    target = tl.zeros([block_m], tl.float32)
    for tile in range(split * tiles, tl.minimum((split + 1) * tiles, tl.cdiv(width, block_n))):
        column = tile * block_n
        z = _logits(h, w, row, column, n, width, hidden_size, block_m, block_n, block_k, descriptors, widen)
        columns = column + tl.arange(0, block_n)
        z = tl.where((columns < width)[None, :], z * scale, -1e30)
        target += tl.sum(tl.where(columns[None, :] == own[:, None], z, 0.0), 1)
        best = tl.maximum(top, tl.max(z, 1))
        z -= best[:, None]
        exp = tl.exp(z)
        shift = top - best
        share = tl.exp(shift)
        weighted = share * (weighted + shift * total) + tl.sum(exp * z, 1)
        total = share * total + tl.sum(exp, 1)
        top = best
        if column < kept_columns:
            place = tl.arange(0, block_m)[:, None] * kept_columns + columns[None, :]
            first = row.to(tl.int64) * kept_columns
            tl.store(kept + first + place, exp.to(kept.dtype.element_ty), mask=inside[:, None])
            tl.store(tops + tile * n + rows, best, mask=inside)
    out = table + split * 4 * n + rows
    tl.store(out, top, mask=inside)
    tl.store(out + n, total, mask=inside)
    tl.store(out + 2 * n, weighted, mask=inside)
    tl.store(out + 3 * n, target, mask=inside)


@triton.jit(do_not_specialize=_ANY)
def backward_kernel(
    h,
    w,
    labels,
    factors,
    used,
    block,
    kept,
    tops,
    n,
    width,
    start,
    scale,
    size,
    kept_columns,
    kept_rows,
    from_kept: tl.constexpr,
    hidden_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
    descriptors: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute one tile of d loss / d logit, from the kept values of forward or from the operands."""
    i, j = _place(tl.cdiv(n, block_m), tl.cdiv(tl.minimum(size, width - start), block_n), group_m)
    row = i * block_m
    rows = row + tl.arange(0, block_m)
    inside = rows < n
    column = start + j * block_n
    columns = column + tl.arange(0, block_n)
    mask = inside[:, None] & (columns < width)[None, :]
    top = tl.load(factors + rows, mask=inside, other=0.0)
    log_total = tl.load(factors + n + rows, mask=inside, other=0.0)
    if from_kept:
        at = tl.load(used + rows, mask=inside, other=0)
        top -= tl.load(tops + column // block_n * kept_rows + at, mask=inside, other=0.0)
        place = at[:, None] * kept_columns + columns[None, :]
        exp = tl.load(kept + place, mask=mask, other=0.0).to(tl.float32)
        z = tl.log(tl.where(exp > 0, exp, 1.0))
        p = exp * tl.exp(-top - log_total)[:, None]
    else:
        z = _logits(h, w, row, column, n, width, hidden_size, block_m, block_n, block_k, descriptors, widen)
        z *= scale
    log_p = z - top[:, None] - log_total[:, None]
    if not from_kept:
        p = tl.exp(log_p)
    every = tl.load(factors + 2 * n + rows, mask=inside, other=0.0)
    of_log = tl.load(factors + 3 * n + rows, mask=inside, other=0.0)
    own = tl.load(factors + 4 * n + rows, mask=inside, other=0.0)
    label = tl.load(labels + rows, mask=inside, other=-1).to(tl.int32)
    gradient = p * (every[:, None] + of_log[:, None] * log_p)
    gradient = tl.where(columns[None, :] == label[:, None], own[:, None], gradient)
    place = tl.arange(0, block_m)[:, None] * size + (columns - start)[None, :]
    first = row.to(tl.int64) * size
    tl.store(block + first + place, gradient.to(block.dtype.element_ty), mask=mask)


@triton.jit
def _place(row_tiles, others, group_m: tl.constexpr):
    """Return this program's row tile and other coordinate, ordered by groups of group_m row tiles."""
    program = tl.program_id(0)
    first = program // (group_m * others) * group_m
    size = tl.minimum(row_tiles - first, group_m)
    program = program % (group_m * others)
    return first + program % size, program // size


@triton.jit
def _logits(
    h,
    w,
    row,
    column,
    n,
    width,
    hidden_size: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    descriptors: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute a tile of h · wᵀ; 0 outside."""
    z = tl.zeros([block_m, block_n], tl.float32)
    if descriptors:
        for k in range(0, hidden_size, block_k):
            a = h.load([row, k])
            b = w.load([column, k])
            if widen:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            z = tl.dot(a, b.T, z, input_precision="ieee")
    else:
        rows = row + tl.arange(0, block_m)
        columns = column + tl.arange(0, block_n)
        ks = tl.arange(0, block_k)
        left = h + rows[:, None].to(tl.int64) * hidden_size + ks[None, :]
        right = w + columns[None, :].to(tl.int64) * hidden_size + ks[:, None]
        for k in range(0, hidden_size, block_k):
            more = k + ks < hidden_size
            a = tl.load(left + k, mask=(rows < n)[:, None] & more[None, :], other=0.0)
            b = tl.load(right + k, mask=(columns < width)[None, :] & more[:, None], other=0.0)
            if widen:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            z = tl.dot(a, b, z, input_precision="ieee")
    return z
