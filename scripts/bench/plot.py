"""A round against the size of what is averaged, a line for each contender: `bench.py --plot FILE` (matplotlib)."""

from pathlib import Path

from bench.payload import SIZES_BYTES
from bench.report import Results


def plot(results: Results, file: Path) -> None:
    """Write ``file``, in the format of its suffix: a panel for each number of workers. Whiskers are quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers = sorted({workers for workers, _, _ in results.cells})
    figure, panels = pyplot.subplots(1, len(numbers), figsize=(6 * len(numbers), 5), sharey=True, squeeze=False)
    for axes, workers in zip(panels[0], numbers, strict=True):
        for name in results.contenders:
            cells = [(SIZES_BYTES[size] / 1e6, results.cell(workers, size, name)) for size in results.sizes]
            known = [(size, *cell.quartiles()) for size, cell in cells if len(cell.rounds) > 1]
            if not known:
                continue
            sizes, first, median, third = ([1e3 * value for value in values] for values in zip(*known, strict=True))
            axes.errorbar(
                [size / 1e3 for size in sizes], median, marker="o", capsize=2, label=name,
                yerr=([m - f for m, f in zip(median, first, strict=True)],
                      [t - m for t, m in zip(third, median, strict=True)]),
                linewidth=2.5 if name.startswith("gradbus") else 1.0,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="MB of float32", title=f"{workers} workers")
        axes.grid(visible=True, which="both", alpha=0.25)
    panels[0][0].set_ylabel("ms for a synchronous round")
    panels[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file)
