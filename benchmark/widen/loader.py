"""SGLang fills its parameters from tensors made on the device: no file of weights, nothing to transfer.

    sglang.Engine(model_path=target, speculative_draft_model_path=draft, load_format=GeneratedLoader, ...)

SGLang takes a loader's class as `load_format` (not from the command line, whose formats are a fixed list). Its
scheduler processes import the class by name, so the repository must be where Python looks for modules, as it is for
`python -m benchmark...`. The drafter follows the same format. Every tensor-parallel rank makes whole tensors, one
layer at a time, and SGLang's own weight loaders keep the rank's part.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from itertools import groupby

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader

from benchmark.widen.folders import open_folder

Layer = list[tuple[str, torch.Tensor]]


def layer_of(name: str) -> str:
    """`model.layers.7` for the tensors of that layer, its own name for any other."""
    prefix, found, rest = name.partition("layers.")
    return prefix + found + rest.split(".")[0] if found else name


class _Named(ABCMeta):
    """A class that becomes JSON as its name, which is how /server_info shows the load format."""

    def __iter__(cls):
        yield "loader", cls.__name__


class GeneratedLoader(DefaultModelLoader, metaclass=_Named):
    """For folders of `python -m benchmark.widen`."""

    def download_model(self, model_config) -> None:
        """Nothing to download."""

    def _get_all_weights(self, model_config, model) -> Iterator[Layer]:
        """The tensors layer by layer: text-only Qwen3.5 gathers whatever it is given in a list before it loads any,
        which would hold the whole model twice."""
        wide = open_folder(model_config.model_path, next(model.parameters()).device)
        for _, names in groupby(wide, layer_of):
            yield [(name, wide[name]) for name in names]

    @staticmethod
    def load_weights_and_postprocess(model, weights: Iterator[Layer], target_device) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        with torch.no_grad():
            for p in parameters.values():
                p.fill_(torch.nan)
        for layer in weights:
            model.load_weights(layer)
        empty = [name for name, p in parameters.items() if p.detach().sum(dtype=torch.float32).isnan()]
        if empty:
            raise RuntimeError(
                f"{type(model).__name__}: {len(empty)} parameters were not filled, such as {empty[0]}"
            )
        DefaultModelLoader.load_weights_and_postprocess(model, (), target_device)
