"""Picture of nodes, processes and their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddp_notebook.errors import UsageError

if TYPE_CHECKING:
    from ddp_notebook.display import Picture

_MOST = 64


def places(nodes: int = 2, per_node: int = 4) -> Picture:
    """Draw nodes as frames and their processes as boxes, with the rank and below it the local rank.

    Args:
        nodes: Number of machines.
        per_node: Processes on each machine, usually the number of its GPUs.

    Raises:
        UsageError: The number of processes is below 1 or above 64.

    Example:
        >>> places(nodes=2, per_node=4).savefig("places.png")
    """
    from matplotlib.patches import FancyBboxPatch

    from ddp_notebook.display import INK, LINES, Picture

    world_size = nodes * per_node
    if nodes < 1 or per_node < 1 or world_size > _MOST:
        raise UsageError(f"nodes * per_node must be 1 to {_MOST}, got {nodes} * {per_node} = {world_size}")
    figure = Picture(figsize=(min(1.0 + 0.9 * per_node, 9), 0.5 + 1.15 * nodes), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    for node in range(nodes):
        y = -1.3 * node
        frame = FancyBboxPatch((-0.5, y - 0.5), per_node, 1, boxstyle="round,pad=0.05", fc="none", ec=INK)
        axes.add_patch(frame)
        axes.text(-0.75, y, f"node {node}", ha="right", va="center", color=INK)
        for local in range(per_node):
            corner = (local - 0.36, y - 0.36)
            axes.add_patch(FancyBboxPatch(corner, 0.72, 0.72, boxstyle="round,pad=0.02", fc="none", ec=LINES[0]))
            rank = node * per_node + local
            axes.text(local, y + 0.1, str(rank), ha="center", va="center", size=15, color=LINES[0])
            axes.text(local, y - 0.24, f"local {local}", ha="center", va="center", size=8, color=INK)
    axes.set(xlim=(-1.7, per_node - 0.3), ylim=(-1.3 * (nodes - 1) - 0.65, 0.65), aspect="equal")
    axes.set_title(f"world size {world_size} = {nodes} nodes x {per_node} processes", size=11, color=INK)
    axes.set_axis_off()
    return figure
