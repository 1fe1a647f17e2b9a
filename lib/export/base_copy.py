"""The base model as transformers reads it: its own folder, or a plain copy where mlx-lm has changed it."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from lib.errors import UserError
from lib.export.fused_weights import QUANTISED, plain_layer, plain_weight
from lib.export.model_files import copy_companions, stored_names, without_quantisation, write_weights
from lib.export.trained_run import TrainedRun
from lib.model.checkpoint_names import expert_pattern, unstacked


def for_transformers(run: TrainedRun, folder: Path) -> Path:
    """A folder that transformers loads the run's base model from: written into `folder`, where it has to be.

    A model that mlx-lm quantised is dequantised, in float32; stacked experts are taken apart.

    Raises:
        UserError: experts whose names in a checkpoint are not known.
    """
    names = stored_names(run.base)
    if not run.is_quantised and not any("switch_mlp" in name for name in names):
        return run.base
    copy = folder / "base"
    copy.mkdir()
    model = run.base_model()
    for name, module in model.named_modules():
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear) and expert_pattern(name) is None:
            raise UserError(f"{name}: how transformers names the experts of this family is not known; add --no-proof")
    plain = {
        name: plain_layer(module, plain_weight(module))
        for name, module in model.named_modules()
        if isinstance(module, QUANTISED)
    }
    model.update_modules(tree_unflatten(list(plain.items())))
    model.set_dtype(mx.float32)
    write_weights(copy, dict(unstacked(dict(tree_flatten(model.parameters())))))
    copy_companions(run.base, copy)
    (copy / "config.json").write_text(json.dumps(without_quantisation(run.base_config)), encoding="utf-8")
    return copy
