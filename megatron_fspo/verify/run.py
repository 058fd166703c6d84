"""Run every layout and loss, and compare each with one process in float64."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fspo.config import Config
from megatron_fspo.mcore.machine.backend import Backend
from megatron_fspo.mcore.machine.startup import join, start, stop
from megatron_fspo.mcore.model.policy import Policy
from megatron_fspo.parallel.groups import share
from megatron_fspo.verify.cases import (
    SPLITS,
    TEMPERATURE,
    Case,
    cases,
    kinds,
    make_routes,
    make_samples,
    random_weights,
    reference_drifts,
)
from megatron_fspo.verify.compare import LIMITS, Errors, compare, diagnose
from megatron_fspo.verify.hf_model import HFModel
from megatron_fspo.verify.layouts import Layout, choose_model
from megatron_fspo.verify.production import build, run, score
from megatron_fspo.verify.reference import FAMILIES, Reference, forward, reference
from megatron_fspo.weights import Architecture, adapter_shapes


@dataclass(frozen=True, kw_only=True)
class Result:
    layout: str
    case: Case
    dtype: torch.dtype
    tied: bool
    errors: Errors
    grad_norm: float
    """Of the reference, in float64."""
    collectives: dict[str, float]
    problems: list[str]
    """Empty if the case passed."""


@dataclass(frozen=True, kw_only=True)
class VerifyPlan:
    """The checked arguments of ``verify``."""

    backend: Backend
    arch: Architecture | None
    """Narrowed model of a run; None: a small model, tied and untied. The layout sets the number of layers."""
    layouts: list[Layout]
    dtypes: list[torch.dtype]
    every_case: bool
    """Run every case in every precision. Otherwise each layout runs every loss once, in one of the
    precisions, and all layouts together cover all pairs."""
    world_size: int


def verify(
    planned: VerifyPlan, config: Config | None, report: Callable[[Layout, list[Result]], None]
) -> list[Result]:
    """Verify every layout. Collective; all ranks return the same results.

    The loss of ``config`` is added to the cases, and its temperature is used. ``report`` is called with each
    layout and its results.
    """
    backend, dtypes = planned.backend, planned.dtypes
    join(backend)  # for sharing the references, before the first layout starts
    temperature = TEMPERATURE if config is None else config.rollout.temperature
    variants = []
    for layout in planned.layouts:
        model = choose_model(layout, planned.arch)
        variants.append(kinds(model) if planned.arch is None else [model])
    # Two shifts give every case with and without replay.
    everything = [case for shift in range(2) for case in cases(config, shift, experts=True)]
    wanted = references({model for models in variants for model in models}, dtypes, everything, temperature)
    stop()
    gc.freeze()  # exempts what exists now from the garbage collections after each layout
    done: list[Result] = []
    for number, layout in enumerate(planned.layouts):
        results: list[Result] = []
        asked = cases(config, number, experts=layout.moe)
        groups = start(backend, parallel=layout.parallel, seed=1)
        for index, dtype in enumerate(possible := possible_dtypes(layout, dtypes)):
            model = variants[number][(number + index) % len(variants[number])]
            policy = build(layout, model, _weights(model, dtypes), backend, groups, dtype)
            chosen = asked if planned.every_case else _share(asked, index, len(possible), number)
            if dtype == torch.bfloat16:
                chosen = [case for case in chosen if case.loss.DECIDES_BY_RATIOS]
                if layout.moe:  # rounding decides between experts of nearly equal score
                    chosen = [replace(case, replay=True) for case in chosen if not case.aux_loss_coef]
            routes = _routes(model, dtypes) if layout.moe else None
            results += check_cases(policy, layout, chosen, wanted[model], temperature, routes)
        report(layout, results)
        done += results
        # Megatron does not destroy its groups, whose threads stay busy: every layout starts anew.
        del groups, policy
        stop()
    return done


def _weights(arch: Architecture, dtypes: Sequence[torch.dtype]) -> dict[str, Tensor]:
    """The weights for all precisions and the reference, rounded to bf16 if that is among the precisions."""
    stored = torch.bfloat16 if torch.bfloat16 in dtypes else torch.float32
    return {name: tensor.to(stored).float() for name, tensor in random_weights(arch).items()}


def _routes(arch: Architecture, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Draw routes to replay. With bf16, whose rounding may change choices, they cover every token."""
    return make_routes(arch, make_samples(arch), gaps=torch.bfloat16 not in dtypes)


def _share(asked: Sequence[Case], index: int, count: int, number: int) -> list[Case]:
    """Return the cases of one of several precisions. The second gets those of two splits, which vary by
    layout, so each split is scored in one precision only."""
    start = 2 * number + number // len(SPLITS)  # cases() rotates the splits by ``number``
    second = {SPLITS[(start + i) % len(SPLITS)] for i in range(2)}
    return [case for case in asked if count == 1 or (case.split in second) == (index == 1)]


def possible_dtypes(layout: Layout, dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """Return the layout's precisions, highest first; the distributed optimizer has no float64."""
    possible = [d for d in dtypes if d != torch.float64 or not layout.parallel.distributed_optimizer]
    return sorted(possible, key=lambda dtype: torch.finfo(dtype).eps)


def check_cases(
    policy: Policy,
    layout: Layout,
    asked: Sequence[Case],
    wanted: dict[str, Reference],
    temperature: float,
    routes: Sequence[Tensor] | None,
) -> list[Result]:
    """Compare each case with the reference of its title; ``routes`` are for cases that replay. Collective."""
    arch, dtype = policy.arch, policy.config.params_dtype
    samples = make_samples(arch)
    scored = {
        key: score(policy, key[0], samples, temperature, routes=routes if key[1] else None, share=key[2])
        for key in {(case.split, case.replay, case.share): None for case in asked}
    }
    results = []
    for case in asked:
        outcome = run(policy, case, scored[case.split, case.replay, case.share], samples)
        want = wanted[case.title]
        errors = compare(policy, outcome, want)
        results.append(
            Result(
                layout=layout.name,
                case=case,
                dtype=dtype,
                tied=arch.tied,
                errors=errors,
                grad_norm=want.grad_norm,
                collectives=outcome.collectives,
                problems=diagnose(
                    outcome,
                    want,
                    errors,
                    LIMITS[dtype],
                    layout,
                    replay=case.replay,
                    sums=case.loss.COLLECTIVES,
                ),
            )
        )
    return results


def references(
    models: Iterable[Architecture], dtypes: Sequence[torch.dtype], asked: Sequence[Case], temperature: float
) -> dict[Architecture, dict[str, Reference]]:
    """Compute references on rank 0 and share them: model → title of a case → reference. Collective."""
    by_model: dict[Architecture, dict[str, Reference]] = {}
    for model in models if dist.get_rank() == 0 else ():
        weights = {name: tensor.double() for name, tensor in _weights(model, dtypes).items()}
        for name in adapter_shapes(model) or weights:
            weights[name].requires_grad_(not name.endswith("e_score_correction_bias"))
        own = model.model_type in FAMILIES and model.window is None and model.yarn is None
        compute = None if own else HFModel(model).logits
        samples, dense = make_samples(model), model.experts is None
        whole = _adapted(weights, model)
        scores = {False: forward(whole, model, samples, temperature, compute_logits=compute)}
        if not dense:
            scores[True] = forward(whole, model, samples, temperature, _routes(model, dtypes), compute)
        by_model[model] = {
            case.title: reference(
                replace(scores[case.replay], weights=weights),
                case.loss,
                case.drifts(samples),
                ref_drifts=reference_drifts(samples) if case.loss.kl_coef else None,
                kl_coef=case.loss.kl_coef,
                aux_loss_coef=case.aux_loss_coef,
                z_loss_coef=case.z_loss_coef,
            )
            for case in asked
            if not (dense and case.needs_experts)
        }
    everyone = dist.group.WORLD
    assert everyone is not None
    # One file, because thousands of tensors pickled one by one take seconds to read.
    file = io.BytesIO()
    torch.save(by_model, file)
    shared = io.BytesIO(share(file.getvalue(), group=everyone))
    result: dict[Architecture, dict[str, Reference]] = torch.load(shared, weights_only=False)
    return result


def _adapted(weights: Mapping[str, Tensor], arch: Architecture) -> Mapping[str, Tensor]:
    """Replace each W that has an adapter by W + scale · B A."""
    if arch.adapters is None:
        return weights
    suffix = ".lora_A.weight"
    names = [name.removesuffix(suffix) for name in weights if name.endswith(suffix)]
    return {
        **weights,
        **{
            f"{name}.weight": weights[f"{name}.weight"]
            + arch.adapters.scale * weights[f"{name}.lora_B.weight"] @ weights[f"{name}{suffix}"]
            for name in names
        },
    }
