"""Create a report of runs in Weights & Biases: learning, the clip, its fairness, health, speed.

    pip install wandb-workspaces
    python examples/wandb_report/report.py --entity my-team --project fspo

It shows the runs of the project (``log.project``), grouped by ``log.group``. You can edit it in the browser.
"""

from __future__ import annotations

import argparse
from typing import Any

import wandb_workspaces.reports.v2 as wr

SECTIONS = {
    "Learning": {
        "Reward": ["critic/rewards/mean"],
        "Response length (tokens)": ["response_length/mean"],
        "Responses cut at the limit": ["response_length/clip_ratio"],
        "Zero-variance groups": ["critic/zero_variance_groups"],
    },
    "The clip": {
        "Share of responses": ["fspo/out_of_band", "fspo/clip_low", "fspo/clip_high", "fspo/dual_clip_frac"],
        "Band and noise (nats per √token)": ["fspo/c_low", "fspo/c_high", "fspo/sigma_hat"],
        "Length reweighting error": ["fspo/lre_mean", "fspo/lre_null"],
        "Effective sample size": ["fspo/ess"],
    },
    "Health": {
        "KL to the rollout policy (nats per token)": ["fspo/kl_k3"],
        "Entropy (nats per token)": ["actor/entropy"],
        "Gradient norm": ["actor/grad_norm", "actor/grad_norm/max"],
        "|S| before the first update (nats)": ["fspo/on_policy_abs_s_max"],
        "Sampler against trainer (nats per √token)": ["rollout/mismatch_sigma"],
        "Canary after weight updates (nats)": ["rollout/canary_abs_diff", "rollout/canary_tolerance"],
        "Responses that are not finite": ["fspo/nonfinite"],
    },
    "Speed": {
        "Tokens per second, all ranks": ["perf/throughput"],
        "Seconds of a step": ["timing_s/step"],
        "Model FLOP utilisation": ["perf/mfu"],
    },
}
"""Section → title of a plot → metrics, which docs/metrics.md explains."""


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--entity", required=True)
    parser.add_argument("--project", required=True)
    args = parser.parse_args()
    report = build(args.entity, args.project)
    report.save()
    print(report.url)


def build(entity: str, project: str) -> Any:
    text = "Start with the reward. Then check how much the clip removes, and whether evenly over lengths."
    blocks: list[Any] = [wr.P(text)]
    for section, plots in SECTIONS.items():
        panels = [
            wr.LinePlot(
                title=title,
                x="Step",
                y=metrics,
                layout=wr.Layout(x=12 * (number % 2), y=8 * (number // 2), w=12, h=8),
            )
            for number, (title, metrics) in enumerate(plots.items())
        ]
        runs = wr.Runset(entity=entity, project=project, groupby=["group"])
        blocks += [wr.H1(section), wr.PanelGrid(runsets=[runs], panels=panels)]
    return wr.Report(entity=entity, project=project, title="FSPO", blocks=blocks)


if __name__ == "__main__":
    main()
