"""The picture of a replay: how near strategies are to the best after so many trials."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .replay import NEAR, TRIALS, Replay

# Colours that stay apart for the colour-blind (Okabe and Ito).
COLOURS = ("#7f7f7f", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7")


def write_curves(result: Replay, path: Path) -> None:
    """The mean regret of each strategy against trials, with intervals of 95 % over kernels, into a PNG."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    trials = list(range(1, TRIALS + 1))
    for name, colour in zip(result.curves, COLOURS, strict=False):
        points = [result.regret(name, n) for n in trials]
        axes.plot(trials, [p[0] for p in points], color=colour, label=f"{name}, {result.near(name)[0]:g} trials")
        axes.fill_between(trials, [p[1] for p in points], [p[2] for p in points], color=colour, alpha=0.15, linewidth=0)
    axes.axhline(NEAR, color="black", linewidth=0.8, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("candidates measured")
    axes.set_ylabel("time of the best so far / best recorded")
    axes.legend(title="median trials to within 2 %")
    axes.set_title(
        f"{len(result.kernels)} nests, {result.report.kind}; models held out by {result.report.holdout}", fontsize=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
