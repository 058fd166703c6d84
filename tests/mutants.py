"""Plants faults in the product, one at a time, and sees that the test of each finds it.

python tests/mutants.py              # all, about five minutes
python tests/mutants.py NAME...      # those

Works in a copy of the tree. Exits with 1 if a fault survives, or if its text is not found exactly once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
IGNORED = shutil.ignore_patterns(".*", "runs", "build", "__pycache__", "*.egg-info")
SECONDS = 300
"""Limit on a test; one that exceeds it has failed."""


@dataclass(frozen=True)
class Mutant:
    """One fault: ``old``, which stands once in the package, becomes ``new``, and the test must fail."""

    old: str
    new: str
    test: str
    """A file, and after a blank a -k expression where a part of it will do."""

    def file(self, tree: Path) -> Path:
        """The file that has the old text.

        Raises:
            ValueError: it is not there exactly once.
        """
        paths = sorted((tree / "megatron_fspo").rglob("*.py"))
        counts = {path: path.read_text(encoding="utf-8").count(self.old) for path in paths}
        if sum(counts.values()) != 1:
            raise ValueError(f"the package has this {sum(counts.values())} times: {self.old}")
        return max(paths, key=lambda path: counts[path])

    def tests(self, tree: Path) -> list[str]:
        """Arguments of pytest.

        Raises:
            ValueError: the file of tests is not there exactly once.
        """
        name, _, chosen = self.test.partition(" ")
        found = [str(path.relative_to(tree)) for path in (tree / "tests").rglob(name)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} files are called {name}")
        return [*found, *(["-k", chosen] if chosen else [])]


MUTANTS = {
    # the objective
    "band: one side with the wrong sign": Mutant(
        "return centre - self.c_low * unit, centre", "return centre + self.c_low * unit, centre",
        "test_band.py",
    ),
    "band: width grows as L, not as its power": Mutant(
        "self.drift * length, length**self.exponent", "self.drift * length, length", "test_band.py",
    ),
    "clip: on the wrong side": Mutant(
        "clipped_low, clipped_high = negative & below, positive & above",
        "clipped_low, clipped_high = positive & below, negative & above", "test_surrogate_cases.py",
    ),
    "dual clip: for positive advantages": Mutant(
        "dual_clipped = negative & (", "dual_clipped = positive & (", "test_surrogate_cases.py",
    ),
    "what is not finite is used": Mutant(
        "usable = present & finite", "usable = present", "test_surrogate_cases.py",
    ),
    "weights outside the mask": Mutant(
        "torch.where(inputs.loss_mask, per_token(weight, inputs), 0.0)", "per_token(weight, inputs)",
        "test_policy.py",
    ),
    "objective counted by every rank": Mutant(
        "share = held / inputs.lengths.clamp(min=1)",
        "share = held.clamp(max=1)", "test_policy.py",
    ),
    "advantages: the mean includes the response": Mutant(
        "return centred * (size / (size - 1))", "return centred", "test_advantages.py",
    ),
    "advantages: n in the variance": Mutant(
        "/ (centred.shape[1] - 1)", "/ centred.shape[1]", "test_advantages.py",
    ),
    "noise: by L, not by its power": Mutant(
        "_median(sums.abs() / kept**exponent)", "_median(sums.abs() / kept)",
        "test_calibration.py",
    ),
    "cppo: earlier tokens do not count": Mutant(
        "outside = moved > self.delta + (self.budget * room - spent).clamp(max=0.0)",
        "outside = moved > self.delta", "test_policy.py reach",
    ),
    "cppo: the reach of a token alone": Mutant(
        "return torch.maximum(moved / self.delta, (moved + spent) / (self.delta + self.budget * room))",
        "return moved / self.delta", "test_policy.py reach",
    ),
    "flips: of the order": Mutant(
        "(given.sort(1).values != own.sort(1).values)", "(given != own)", "test_route_flips.py",
    ),
    "corrections: each rank its own": Mutant(
        "mismatch = replace(mismatch, sums=sums)", "pass",
        "test_rollout_weights.py alike",
    ),
    "a gradient that is not finite is taken": Mutant(
        "    if finite and not spike:", "    if not spike:", "test_spikes.py finite",
    ),
    "correction: the cap is taken for its logarithm": Mutant(
        "clamp(max=math.log(cap))", "clamp(max=cap)", "test_correction.py",
    ),
    # packs and reductions
    "mask: begins a token late": Mutant(
        "torch.stack([prompts - 1, prompts + responses - 1], dim=1)",
        "torch.stack([prompts, prompts + responses - 1], dim=1)", "test_batch.py",
    ),
    "labels: not shifted": Mutant(
        "(start + 1, (0, labels))", "(start, (0, labels))", "test_batch.py",
    ),
    "turns: all from one random stream": Mutant(
        "turn_seed(request.seed, len(trajectory.turns))", "turn_seed(request.seed, 0)",
        "test_trajectories.py",
    ),
    "turns: at any server": Mutant(
        "(slot not in near, slot.open)", "slot.open", "test_trajectories.py",
    ),
    "turns: one more than there may be": Mutant(
        "len(self._written) == self.params.turns", "len(self._written) > self.params.turns",
        "test_trajectories.py",
    ),
    "a tool's text: special tokens stay": Mutant(
        "if token not in self._special]", "]", "test_text.py",
    ),
    "a tool's text: the end of a turn twice": Mutant(
        "tuple(ids[1:] if ended", "tuple(ids if ended", "test_text.py",
    ),
    "drift: the wrong sign": Mutant(
        "drift -= max(sigma**2", "drift += max(sigma**2", "test_length_band.py",
    ),
    "drift: that of the last optimizer step for all": Mutant(
        "if step <= update and len(spreads) > 1", "if len(spreads) > 1", "test_length_band.py",
    ),
    "drift: it follows a policy that runs away": Mutant(
        "sigma = min(median_low(self._spreads[max(known)]), most)",
        "sigma = median_low(self._spreads[max(known)])", "test_length_band.py",
    ),
    "drift: limited in the unit of c": Mutant(
        "/ 2 * length ** max(a - 0.5, 0.0)", "/ 2", "test_length_band.py exponent",
    ),
    "rewards: a penalty hides that none differ": Mutant(
        "or inputs.config.teacher.in_use:", "or inputs.config.loss.kl_coef:", "test_zero_variance.py penalty",
    ),
    "servers: one that still loads is refused": Mutant(
        "if not absent or time.monotonic() >= end:", "if True:", "test_absent_servers.py",
    ),
    "sft: a response without its end is learned": Mutant(
        "if runs and not {*runs[-1][0]} & {*stops}:", "if False:", "test_demonstrations.py refused",
    ),
    "drift: the mean of S, which is learning": Mutant(
        "            spread = centred_sigma(log_ratio_sums, lengths)",
        "            spread = (2 * abs(log_ratio_sums.mean() / lengths.double().mean())).sqrt().item()",
        "test_length_band.py",
    ),
    "calibration: c follows without a limit": Mutant(
        "self.c = min(max(now, self.steady_c / FARTHEST), self.steady_c * FARTHEST)", "self.c = now",
        "test_length_band.py",
    ),
    "agents: children outlive them": Mutant(
        "if mark.encode() in environ.read_bytes()", "if mark.encode() == environ.read_bytes()",
        "test_agent.py daemon",
    ),
    "agents: the group outlives its leader": Mutant(
        "        kill_group(process)\n        kill_marked", "        kill_marked", "test_agent.py group",
    ),
    "agents: they outlive a killed trainer": Mutant(
        "f\"kill_marked('OPENAI_BASE_URL={self.address}')\"", '"pass"', "test_agent.py outlives",
    ),
    "workers: what they forked outlives them": Mutant(
        "suppress(ProcessLookupError):\n            os.killpg(process.pid, signal.SIGKILL)",
        "suppress(ProcessLookupError):\n            process.kill()", "test_pool.py closing",
    ),
    "a tool's error: half a character": Mutant(
        'f"error: {error}".encode("utf-8", "replace").decode()', 'f"error: {error}"',
        "test_text.py goes_wrong",
    ),
    "a tool's reward: any number": Mutant(
        "not abs(observed.reward) <= LARGEST", "observed.reward != observed.reward",
        "test_text.py goes_wrong",
    ),
    "environments: a variable that is not set": Mutant(
        "if name not in os.environ]", "if not name]", "test_text.py not_there",
    ),
    "agents: any size": Mutant(
        "len(length) > 9 or int(length) > _LARGEST", "False", "test_agent.py large",
    ),
    "agents: any reward": Mutant(
        "self.reward = reward if abs(reward) <= LARGEST else None", "self.reward = reward",
        "test_agent.py prints",
    ),
    "agents: all that they print is kept": Mutant(
        "(end + chunk)[-_TAIL:]", "end + chunk", "test_agent.py prints",
    ),
    "children have our keys": Mutant(
        'if name in _PASSED_ON or name.startswith("LC_") or name in names', "", "test_agent.py keys",
    ),
    "a tool's wrong types": Mutant(
        "if not isinstance(value, _TYPES.get(key, ()))", "if key not in _TYPES", "test_text.py goes_wrong",
    ),
    "a busy server is asked once": Mutant(
        "self.status in (0, 429)", "self.status == 0", "test_remote.py again",
    ),
    "answers without an end": Mutant(
        "elif len(content) > most:", "elif False:", "test_remote.py failure",
    ),
    "a drip is waited for": Mutant(
        "limit.deadline = end", "pass", "test_remote.py answer",
    ),
    "a limit that ends before the request": Mutant(
        'if event == "http11.send_request_headers.started":', "if True:", "test_remote_loop.py moment",
    ),
    "a silent environment": Mutant(
        "if time.monotonic() - self._replied > environment.limit_seconds:", "if True:",
        "test_trajectories.py silent",
    ),
    "rows: read those before": Mutant(
        "pairwise(borders[i][1:])]", "pairwise(borders[i][1:2])]", "test_rows.py"
    ),
    "rows: positions go on": Mutant(
        "self.position_ids[0] - self.restarted", "self.position_ids[0]", "test_rows.py"
    ),
    "rows: prefix sums begin anew": Mutant(
        "before += _sum_earlier(chunks.sum(0), owner)[..., None]", "pass", "test_parallel.py reductions"
    ),
    "rows: a context is the whole trajectory": Mutant(
        "return (*self.context, *self.token_ids[self.row_start :])",
        "return (*self.prompt.token_ids, *self.token_ids)",
        "test_trajectories.py servers",
    ),
    "agents: no check of the first conversation": Mutant(
        'if "".join(render(self._tokenizer, request.messages)) != prompt.text:', "if False:", "test_agent.py"
    ),
    "inserted tokens: learned": Mutant("mask = mask & owned", "mask = mask | owned", "test_batch.py"),
    "inserted tokens: in L": Mutant(
        "lengths=sequences.lengths[chosen]", "lengths=responses", "test_batch.py",
    ),
    "packs: too full by a token": Mutant(
        "while cheapest and room[cheapest[0][1]] < length:",
        "while cheapest and room[cheapest[0][1]] < length - 1:", "test_plan.py",
    ),
    "N: of a rank": Mutant(
        "num_sequences=sum(length > 0 for length in lengths)",
        "num_sequences=sum(n > 0 for n in lengths) // layout.data_size", "test_alignment.py counts",
    ),
    "N: empty responses count": Mutant(
        "num_sequences=sum(length > 0 for length in lengths)", "num_sequences=len(lengths)",
        "test_alignment.py counts",
    ),
    "context parallel: chunks of one rank lie side by side": Mutant(
        "[rank, chunks - 1 - rank]", "[2 * rank, 2 * rank + 1]", "test_zigzag.py",
    ),
    "sums: without the other ranks": Mutant(
        "dist.all_reduce(digits, group=group)", "dist.all_reduce(digits.clone(), group=group)",
        "test_parallel.py 2",
    ),
    "sums: what is outside the mask": Mutant(
        "sums.add(torch.where(mask, values, 0.0), segment)", "sums.add(values, segment)",
        "test_parallel.py 1",
    ),
    "metrics: the denominator of one pass": Mutant(
        "(before[0] + total, before[1] + count)", "(before[0] + total, count)", "test_pooled_metrics.py",
    ),
    "head: the gradient's sign": Mutant(".mul_(-scale)", ".mul_(scale)", "test_head.py 1"),
    # data and rewards
    "cursor: the place in an epoch is not saved": Mutant(
        "return [[epoch.epoch, epoch.offset, t] for", "return [[epoch.epoch, 0, t] for", "test_cursor.py",
    ),
    "batches under way are not saved": Mutant(
        '"open": [*self._open, *self._again]', '"open": []', "test_cursor.py",
    ),
    "overlong: reaches its end at once": Mutant(
        "min(over / tokens, 1.0)", "min(over, 1.0)", "test_grader.py penalty",
    ),
    # rollouts and the trainer
    "tokens older than allowed": Mutant(
        "if oldest > limit:", "if oldest > limit + 1:", "test_rollout_queue.py",
    ),
    "the same seed in every step": Mutant(
        "1_000_000_007 + step + (number << 64)", "1_000_000_007 + (number << 64)", "test_rollout_queue.py",
    ),
    "a server without the new weights": Mutant(
        "if completion.weight_version < oldest_version:", "if completion.weight_version < 0:",
        "test_vllm_pool.py",
    ),
    "a spike that is one of no size": Mutant(
        "grad_norm > ratio * usual", "grad_norm > usual", "test_spikes.py median",
    ),
    "the lock of another process with our number": Mutant(
        "return _started(self.process) == self.started", "return True", "test_lock.py",
    ),
    "two take over a lock, one after the other": Mutant(
        "if _claim(path, read_owner(path.parent)) != first:", "if False:", "test_lock.py three",
    ),
    "pass@k: of the right ones": Mutant(
        "math.comb(n - right, k)", "math.comb(right, k)", "test_estimators.py",
    ),
    "a server's other weights agree": Mutant(
        "return max(gaps) if max(gaps) > allowed else 0.0", "return 0.0", "test_proof.py",
    ),
    "a server's half of a tensor agrees": Mutant(
        "if rest or not copies:", "if not copies:", "test_proof.py",
    ),
    "the limit of the KL on the other side": Mutant(
        "any_rank(kl > limit,", "any_rank(kl < limit,", "test_max_kl.py",
    ),
    # what comes from outside
    "any key opens": Mutant("hmac.compare_digest(_digest(key), self._digest)", "key", "test_inside_vllm.py"),
    "a server started without its guard": Mutant(
        "return words if api_key() is None else", "return words if api_key() else", "test_serve.py guard",
    ),
    "a checkpoint names any class": Mutant(
        "if (module, name) not in self._allowed:", "if not module:", "test_megatron_damage.py",
    ),
    "nodes unpickle what strangers write": Mutant(
        "Unpickler(decoded[0], _TYPES).load()", "pass", "test_rendezvous.py states",
    ),
    "a store on all interfaces": Mutant(
        "timeout=timeout, master_listen_fd=listener.detach()", "timeout=timeout",
        "test_rendezvous.py one_address",
    ),
    "a job at a public address": Mutant(
        "if ip_address(ip).is_global and", "if not ip and", "test_wrong_inputs.py public",
    ),
    "adapters of PEFT: any scale": Mutant(
        "or not math.isclose(scale, adapters.scale):", "or False:", "test_peft_folder.py",
    ),
    "adapters of PEFT: any shape": Mutant(
        "if tuple(tensor.shape) != shapes[name] or", "if", "test_peft_folder.py",
    ),
    "adapters of PEFT: any number": Mutant(
        'check_finite(tensor, f"{folder}: {name}")', "pass", "test_peft_folder.py",
    ),
    "adapters of PEFT: any key": Mutant("if not plain:", "if False:", "test_peft_folder.py"),
    "adapters: one beginning for every seed": Mutant(
        'f"{seed} {name}".encode()', "name.encode()", "test_lora.py",
    ),
    "adapters: a beginning that is too wide": Mutant(
        "generator=generator) / math.sqrt(shape[1])", "generator=generator) / math.sqrt(shape[0])",
        "test_lora.py",
    ),
    "adapters: o and down without the scale": Mutant(
        "return product + _adapters(arch).scale * _product", "return product + _product", "test_lora.py",
    ),
    "adapters: q, k, v without the scale": Mutant(
        "return product + adapters.scale * _in_order", "return product + _in_order", "test_lora.py",
    ),
    "adapters: merged without the scale": Mutant(
        "return _adapters(arch).scale * whole.t()", "return whole.t()", "test_lora.py",
    ),
    "a checkpoint of another function": Mutant(
        "if stored.get(name) != ours.get(name):", "if False:", "test_function.py",
    ),
    "an entry is unpickled freely": Mutant(
        'torch.load(entry, map_location="cpu", weights_only=True)',
        'torch.load(entry, map_location="cpu", weights_only=False)', "test_megatron_damage.py",
    ),
    "rewards: numbers by an absolute difference": Mutant(
        "return equal_decimals(first, second) if first and second else _within_limits(",
        "return _within_limits(", "test_math.py reports",
    ),
    "rewards: an answer inside thinking": Mutant(
        "text.rfind(begin) <= text.rfind(end)", "text", "test_extract.py thinking",
    ),
    "rewards: sides that contradict each other": Mutant(
        "if not all(equal_decimals(before, after, places=1)", "if not all(True",
        "test_math.py reports",
    ),
    "rows: no tools for the template": Mutant(", **task.template", "", "test_prompts.py rendered"),
    "rows: the answer in the prompt": Mutant(
        'if messages[-1]["role"] == "assistant":', "if not messages:", "test_prompts.py refused",
    ),
    "rows: Arrow's nulls": Mutant("if not (inside and item is None)", "", "test_parquet.py tools"),
    "resume: other rows": Mutant(
        '            "rows": rows,', '            "rows": "",', "test_cursor.py digest"
    ),
    "end tokens: generation_config.json alone": Mutant(
        '("generation_config.json", "config.json")', '("generation_config.json",)', "test_tokenizer.py",
    ),
    "dumps: one mask of several": Mutant(
        'for number, name in enumerate(here[1:]) if field == "mask"', "for number, name in ()",
        "test_explain_dump.py masks",
    ),
    "folders: templates by name stay behind": Mutant(
        ', *folder.glob("additional_chat_templates/*")', "", "test_weights_writer.py along",
    ),
    "vLLM: an aborted response ends the run": Mutant(
        "raise ServerLost(text) from None", "raise BadAnswer(text) from None",
        "test_vllm_http.py elsewhere",
    ),
    "a checkpoint is named before it is on the disk": Mutant(
        "os.fsync(descriptor)", "pass", "test_durable.py",
    ),
    "packed tensors overlap": Mutant(
        "accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for",
        "accumulate((size // _ALIGNMENT * _ALIGNMENT for", "test_buckets.py",
    ),
    "a bucket of weights may come twice": Mutant(
        "if twice := arrived.intersection(names):", "if twice := set():", "test_senders.py twice",
    ),
    "workers of an interrupted update wait on": Mutant(
        "sender.close()  # else workers would", "pass  # else workers would", "test_senders.py interrupted",
    ),
    "a lost server is noticed when the broadcast gives up": Mutant(
        "if asyncio.current_task() in self._loading:", "if False:", "test_senders.py lost",
    ),
    "a window is a token too long": Mutant(
        "mask.triu(before - window + 1)", "mask.triu(before - window)",
        "test_packed_attention.py window",
    ),
    "parts of one tensor are read from its start": Mutant(
        "first = above.get(tensor.name, 0)", "first = 0", "test_weights_round_trip.py any_sizes",
    ),
    "a dense layer is taken for one with experts": Mutant(
        "(layer < arch.dense_layers)", "(layer <= arch.dense_layers)", "test_weights_round_trip.py dense",
    ),
    "the transformers reference is not widened": Mutant(
        "if self.active and wide:", "if False:", "test_family_gradients.py widened",
    ),
    "ranks that wait in a circle are not seen": Mutant(
        'graph["end", units[place]].add(("meet", meeting))', "pass", "test_match.py",
    ),
    "a rank that makes a call less is not seen": Mutant(
        "texts = texts if len(sides) > 1 else", "texts = [] if None in calls.values() else",
        "test_match.py",
    ),
}  # fmt: skip


def passes(tree: Path, mutant: Mutant) -> bool:
    """True if its test passes in the tree, within :data:`SECONDS`.

    Raises:
        RuntimeError: it can be neither collected nor run.
    """
    words = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not vllm and not gpu and not slow"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, *mutant.tests(tree)],
            cwd=tree,
            env={
                **os.environ,
                "PYTHONPATH": str(tree),
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.test}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main(names: list[str]) -> int:
    chosen = {name: MUTANTS[name] for name in names or MUTANTS}
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(REPO, tree, ignore=IGNORED)
        for test, mutant in {mutant.test: mutant for mutant in chosen.values()}.items():
            if not passes(tree, mutant):
                raise SystemExit(f"{test} fails without any fault")
        for name, mutant in chosen.items():
            began = time.monotonic()
            try:
                path = mutant.file(tree)
            except ValueError as error:
                outcome = f"LOST: {error}"
            else:
                sound = path.read_text(encoding="utf-8")
                path.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
                outcome = "SURVIVES" if passes(tree, mutant) else "dies"
                path.write_text(sound, encoding="utf-8")
            bad += outcome != "dies"
            print(f"{name:<56}{mutant.test:<36}{time.monotonic() - began:4.0f} s  {outcome}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    names = parser.parse_args().names
    if unknown := set(names) - set(MUTANTS):
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    sys.exit(main(names))
