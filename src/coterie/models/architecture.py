"""Where an adapter attaches to a base model, read from its configuration without weights."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie.core.errors import ModelError
from coterie.core.foreign import json_of, opened, read_bytes, refusing
from coterie.core.importing import uncollected
from coterie.models import families, gguf_base
from coterie.models.layout import Layout

EMBEDDED = "embedded"  # the name of the small base model that comes with the package
# environment variable: 1 where whoever runs this process lets a base bring code of its own
TRUST = "COTERIE_TRUST_REMOTE_CODE"
_EMBEDDED_FOLDER = Path(__file__).parent / "mini"
# endings of a base's files that change what it is
_READ = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"}
_REMEDY_FOR_CODE = (
    "Use a base that transformers itself supports. If you have read that code and trust it, use "
    f"--trust-remote-code, or set {TRUST}=1 in the environment."
)
_SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Architecture:
    """The layers that an adapter attaches to, with their sizes."""

    family: str  # name of one of `FAMILIES`
    blocks: tuple[families.BlockShape, ...]  # from input to output
    d_model: int  # width of the residual stream
    vocabulary: int  # number of token ids

    @property
    def linears(self) -> list[families.LinearShape]:
        """The linear layers of all blocks."""
        return [layer for block in self.blocks for layer in (*block.attention, *block.mlp)]

    def targets(self, layout: Layout) -> set[str]:
        """Return the layers of a block that have updates, those of an MLP by our names. Raises
        ModelError for a target that there is not, or experts without any.
        """
        family = next(family for family in families.FAMILIES if family.name == self.family)
        paths = family.paths
        for name in layout.target_modules or ():
            if not any(replace(layout, target_modules=(name,)).targets(x) for x in paths.values()):
                layers = dict.fromkeys(path.rpartition(".")[2] for path in paths.values())
                problem = f"model.target_modules: {name}: no layer of this base is called that"
                raise ModelError(problem, f"It has {', '.join(layers)}.")
        targets = {name for name, path in paths.items() if layout.targets(path)}
        if layout.experts > 1 and targets.isdisjoint(family.mlp):
            raise ModelError(
                "model.target_modules: names no layer of the MLP, of which there are experts",
                f"Add one of {', '.join(dict.fromkeys(family.mlp.values()))}, or take a method of "
                "one expert, such as fedavg with method.budget: rank.",
            )
        return targets

    @classmethod
    def of(cls, model: nn.Module) -> "Architecture":
        """Return the architecture of a causal LM. Raises ModelError if it lacks layers."""
        family = families.family_of(model)
        blocks = families.shape_of(family, model)
        config: Any = model.config
        return cls(family.name, blocks, blocks[0].mlp[0].inputs, int(config.vocab_size))

    @classmethod
    def from_base(cls, base: str | Path) -> "Architecture":
        """Return the architecture of a base from its `outline`."""
        return cls.of(outline(base))


def outline(base: str | Path) -> nn.Module:
    """Return a base on the meta device. Raises ModelError: missing, or unknown to transformers."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    with explained(base), uncollected():
        config = configuration(base)
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not trusted():
            raise ModelError(
                f"base {str(base)!r} is a {config.model_type} model, and transformers has no "
                f"causal language model of that kind",
                families.REMEDY,
            )
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted())
    return model


def trusted() -> bool:
    """Whether code contained in a base may run: only this process's environment can allow it.

    A recipe may come from a server, and a personal model from a stranger: neither can set it.
    """
    return os.environ.get(TRUST) == "1"


@uncollected()
def configuration(base: str | Path, **settings: Any) -> Any:
    """Return transformers' configuration of a base, with other values for some settings.

    Raises ModelError if it needs code of its own, which only runs if `trusted`, or whatever
    transformers raises.
    """
    from transformers import AutoConfig

    source = locate(base)
    if (code := _foreign_code(source)) and not trusted():
        problem = f"base {str(base)!r} contains its own code ({', '.join(code)}), which was not run"
        raise ModelError(problem, _REMEDY_FOR_CODE)
    return AutoConfig.from_pretrained(source, trust_remote_code=trusted(), **settings)


def _foreign_code(source: str) -> list[str]:
    """Return the base's own modules of code that it needs, as transformers has none for it."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    settings, _ = PreTrainedConfig.get_config_dict(source)
    families.check_parts(settings, source)
    named = settings.get("auto_map")
    if not isinstance(named, dict) or settings.get("model_type") in CONFIG_MAPPING:
        return []
    return sorted({str(value) for value in named.values()})


def locate(base: str | Path) -> str:
    """Return the folder of a base, or its Hub id; of a GGUF file, the folder that is made of it.
    Raises ModelError for a path that is no base.
    """
    if str(base) == EMBEDDED:
        base = _EMBEDDED_FOLDER
    elif gguf_base.names_file(base) and not Path(base).expanduser().is_dir():
        base = Path(gguf_base.folder_of(base))
    path = Path(base).expanduser()
    if path.is_dir():
        refuse_adapter(path)
        if not (path / "config.json").is_file():
            problem = f"{path} is not a model folder: config.json is missing"
            raise ModelError(problem, "Give the folder that `save_pretrained` wrote.")
        _check_files(path)
        return str(path)
    if (
        isinstance(base, Path)
        or path.is_absolute()
        or str(base).startswith((".", "~"))
        or len(path.parts) > 2
        or path.exists()
    ):
        problem = f"no model folder at {path}"
        raise ModelError(problem, "Check the path, or give a Hub id such as openai-community/gpt2.")
    return str(base)


def _check_files(folder: Path) -> None:
    """Refuse a base's folder in which transformers would wait for a pipe, or read a setting that
    another of the same name hides. Raises ModelError.
    """
    for path in folder.iterdir():
        if path.suffix in _READ and path.exists() and not path.is_dir():
            what = f"cannot load base {str(folder)!r}: {path.name}"
            with refusing(ModelError, what, "Get the base again."):
                if path.name in _SETTINGS:  # some of which have infinite bounds
                    json_of(read_bytes(path), finite=False)
                else:
                    opened(path).close()


def refuse_adapter(base: str | Path) -> None:
    """Refuse a folder or Hub id of a PEFT adapter, which transformers would silently load on top of
    the base that it names. Raises ModelError.
    """
    if Path(base).is_dir():
        has_adapter = (Path(base) / "adapter_config.json").is_file()
    else:
        from transformers.utils import find_adapter_config_file

        has_adapter = find_adapter_config_file(str(base)) is not None
    if has_adapter:
        raise ModelError(
            f"{base} holds a PEFT adapter (adapter_config.json), which is no base",
            "Move the adapter's files elsewhere to use the base without it; or add it to the "
            "weights of its base, PeftModel.from_pretrained(...).merge_and_unload(), and name "
            "the folder that save_pretrained writes of that.",
        )


def files_of(base: str | Path) -> list[Path]:
    """Return a base's files on this machine; [] if it is on the Hub. Raises ModelError."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(source := locate(base))
    if not folder.is_dir():
        kept = try_to_load_from_cache(source, "config.json")
        if not isinstance(kept, str):
            return []
        folder = Path(kept).parent
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in _READ and not path.name.startswith(".") and path.is_file()
    )


def tokenizer(base: str | Path) -> Any:
    """Return a base's tokenizer. Raises ModelError if it has none."""
    from transformers import AutoTokenizer

    source = locate(base)
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trusted())
    except BaseException as error:  # transformers raises whatever its readers happen to
        _raise_signals(error)
        reason = str(error).strip().split("\n")[0]
        if not trusted() and "custom code" in reason:
            problem = f"the tokenizer of base {source!r} contains its own code, which was not run"
            raise ModelError(problem, _REMEDY_FOR_CODE) from None
        raise ModelError(
            f"base {source!r} has no usable tokenizer: {reason}",
            "Put the tokenizer's files (tokenizer.json, tokenizer_config.json) into its folder.",
        ) from error


def _raise_signals(error: BaseException) -> None:
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


@contextmanager
def explained(base: str | Path) -> Iterator[None]:
    """Turn errors of transformers while it loads `base` into a ModelError."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:  # what readers of configurations and weights happen to raise
        _raise_signals(error)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        remedy = (
            "Check the folder: it needs config.json and complete weights (model.safetensors)."
            if os.path.isdir(locate(base))
            else "Check the Hub id and the network, or download it once and give the local folder."
        )
        raise ModelError(f"cannot load base {str(base)!r}: {reason}", remedy) from error
