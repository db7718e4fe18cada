"""Schedules of `lessons.pipeline`, and its limits."""

from __future__ import annotations

MOST_MICROBATCHES = 32
STAGE_MS = 20.0  # total time of the forwards of a rank's stages
_LOOP, _VEE = "[rank, rank + world_size]", "[rank, 2 * world_size - 1 - rank]"
SCHEDULES = {  # name in torch, and the stages of a rank
    "GPipe": ("ScheduleGPipe", "[rank]"),
    "1F1B": ("Schedule1F1B", "[rank]"),
    "Interleaved1F1B": ("ScheduleInterleaved1F1B", _LOOP),
    "LoopedBFS": ("ScheduleLoopedBFS", _LOOP),
    "InterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", _LOOP),
    "ZBVZeroBubble": ("ScheduleZBVZeroBubble", _VEE),
    "DualPipeV": ("ScheduleDualPipeV", _VEE),
}
