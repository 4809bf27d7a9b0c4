"""The picture of a benchmark run: time and floor against T, one line a system, one panel a shape and adapter set."""

from __future__ import annotations

from pathlib import Path


def draw(results: list[dict], path: Path) -> None:
    """Writes a PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys((result["shape"], result["adapters"]) for result in results))
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False, sharey=True)
    for axis, (shape, adapters) in zip(axes[0], panels, strict=True):
        rows = [row for row in results if (row["shape"], row["adapters"]) == (shape, adapters)]
        axis.loglog([row["tokens"] for row in rows], [row["floor_us"] for row in rows], "k--", label="floor")
        for system in dict.fromkeys(name for row in rows for name in row["us"]):
            timed = [row for row in rows if system in row["us"]]
            axis.loglog([r["tokens"] for r in timed], [r["us"][system] for r in timed], "o-", label=system)
        axis.set_title(f"{shape}, adapters: {adapters}")
        axis.set_xlabel("tokens")
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].set_ylabel("µs per layer")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
