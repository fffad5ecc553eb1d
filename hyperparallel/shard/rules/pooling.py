"""Rules of pooling and resizing: batch and channels are free, spatial dims are blocked."""

from __future__ import annotations

from hyperparallel.shard.rules.operands import Builder, line

_LINEAR = ((0,),)


def _planes(count: int, linear: tuple[tuple[int, ...], ...] = _LINEAR) -> Builder:
    before, after = (" ".join(f"[{c}{i}]" for i in range(count)) for c in "xy")
    return line(f"... {before} -> ... {after}", linear, reduce=None)


_BACK = line("... [y0] [y1], ... [x0] [x1] -> ... [x0] [x1]", _LINEAR, reduce=None)

RULES: dict[str, Builder] = {
    "aten.avg_pool2d": _planes(2),
    "aten._adaptive_avg_pool2d": _planes(2),
    "aten.upsample_bicubic2d": _planes(2),
    "aten.upsample_bilinear2d": _planes(2),
    "aten._upsample_bicubic2d_aa": _planes(2),
    "aten._upsample_bilinear2d_aa": _planes(2),
    "aten.upsample_nearest2d": _planes(2),
    "aten.upsample_bicubic2d_backward": _planes(2),
    "aten.upsample_bilinear2d_backward": _planes(2),
    "aten._upsample_bicubic2d_aa_backward": _planes(2),
    "aten._upsample_bilinear2d_aa_backward": _planes(2),
    "aten.upsample_nearest2d_backward": _planes(2),
    "aten.avg_pool2d_backward": _BACK,
    "aten._adaptive_avg_pool2d_backward": _BACK,
    "aten.max_pool2d_with_indices": line(
        "... [x0] [x1] -> ... [y0] [y1], ... [y0] [y1]", reduce=None
    ),
    "aten.max_pool2d_with_indices_backward": line(
        "... [y0] [y1], ... [x0] [x1], ... [y0] [y1] -> ... [x0] [x1]", _LINEAR, reduce=None
    ),
}
