"""A base in a GGUF file, as llama.cpp and Ollama use them: read once by transformers, dequantised,
and kept in the cache as a folder like any other.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from coterie.core import devices, foreign
from coterie.core.errors import ModelError
from coterie.core.importing import quietly, require
from coterie.data.store import cached, default_cache
from coterie.models.families import check_parts

ENDING = ".gguf"
FORMAT = 2  # raise it whenever equal keys would no longer mean equal folders
_IN_FP32 = 10**9  # weights; beyond it, those of quantised files take half of the space in bf16
_LAST = "generation_config.json"  # written last
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# llama.cpp's names of ways to split text that transformers does not look at: as GPT-2 does, the
# same with each digit apart, and as Qwen2 does
_AS_GPT2 = {"gpt-2", "default", "phi-2", "mpt", "olmo", "jais"}
_DIGITS_APART = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_AS_QWEN2 = {"stablelm2"}


def names_file(base: str | Path) -> bool:
    """Whether a base is a GGUF file: a path, or OWNER/NAME/FILE.gguf on the Hub."""
    return str(base).lower().endswith(ENDING)


def folder_of(base: str | Path) -> str:
    """Return the folder with a GGUF file's configuration, weights, tokenizer and chat template,
    written to the cache at the first call. Raises ModelError: there is no such file, or
    transformers cannot read its family or quantisation; SaveError.
    """
    path = file_of(base)
    remedy = "Check its permissions, or get it again."
    with foreign.refusing(ModelError, str(path), remedy), foreign.opened(path) as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file", "Get it again.")
    about = path.stat()
    return _converted(path, (about.st_size, about.st_mtime_ns))


def file_of(base: str | Path) -> Path:
    """Return the file on this machine; one of the Hub is downloaded once. Raises ModelError."""
    path = Path(base).expanduser()
    if path.is_file():
        return path.resolve()
    owner, _, rest = str(base).partition("/")
    name, _, file = rest.partition("/")
    if path.is_absolute() or str(base).startswith((".", "~")) or not file or path.parent.exists():
        problem = f"no GGUF file at {path}"
        raise ModelError(problem, "Check the path, or give OWNER/NAME/FILE.gguf of the Hub.")
    return _downloaded(f"{owner}/{name}", file)


@lru_cache  # each call would ask the Hub anew
def _downloaded(repository: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    require(file, "gguf")
    try:
        return Path(hf_hub_download(repository, file))
    except (OSError, ValueError, HfHubHTTPError) as error:
        problem = f"cannot get {file} of {repository} from the Hub: {_first_line(error)}"
        remedy = "Check the name and the network, or download it once and give its path."
        raise ModelError(problem, remedy) from error


@lru_cache(maxsize=2)
def _converted(path: Path, stamp: tuple[int, int]) -> str:
    digest = blake2b(repr((FORMAT, str(path), stamp)).encode(), digest_size=16).hexdigest()
    entry = default_cache() / f"gguf-{path.stem[:60]}-{digest}"

    def read(entry: Path) -> str | None:
        return str(entry) if (entry / _LAST).is_file() else None

    return cached(entry, "base", read, lambda: _read(path))


def _read(path: Path) -> Callable[[Path], None]:
    """Return what writes the folder of a file. Raises ModelError."""
    require(path.name, "gguf")
    import gguf
    import transformers

    if _PART.search(path.name):
        problem = f"{path} is one of several parts of a model"
        raise ModelError(problem, "Put them together: `llama-gguf-split --merge FIRST OUT.gguf`.")
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    safely = where | {"trust_remote_code": False}
    try:
        with quietly():
            settings, _ = transformers.PreTrainedConfig.get_config_dict(path.parent, **where)
            check_parts(settings, str(path))
            reader = gguf.GGUFReader(path)
            dtype = _dtype(path, reader)
            tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **safely)
            _split_text(path, reader, tokenizer)
            config = transformers.AutoConfig.from_pretrained(path.parent, **safely)
            _scale_positions(path, reader, config)
            safely |= {"config": config, "dtype": dtype, "weights_only": True}
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, output_loading_info=True, **safely
            )
    except ModelError:
        raise
    except Exception as error:  # whatever its reader happens to raise
        problem = f"transformers cannot read {path}: {_first_line(error)}"
        raise ModelError(problem, _supported()) from error
    if missing := sorted(report["missing_keys"]):
        problem = f"{path} lacks {missing[0]!r} ({len(missing)} tensors in all)"
        raise ModelError(problem, "The file is incomplete: get it again.")
    # what is written is not quantised any more
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    generation = transformers.GenerationConfig.from_model_config(model.config)

    def write(folder: Path) -> None:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        generation.save_pretrained(folder)

    return write


def _dtype(path: Path, reader: Any) -> torch.dtype:
    """Return what a file's weights are kept in. Raises ModelError if they do not fit into memory,
    before they are read.
    """
    count = sum(int(tensor.n_elements) for tensor in reader.tensors)
    dtype = torch.float32 if count <= _IN_FP32 else torch.bfloat16
    here = devices.memory_here()
    if here is not None and (needed := count * dtype.itemsize) > here:
        problem = f"{path}: its weights take {needed / 1e9:.1f} GB, and there are {here / 1e9:.1f}"
        raise ModelError(problem, "Take a smaller base, or a machine with more memory.")
    return dtype


def _split_text(path: Path, reader: Any, tokenizer: Any) -> None:
    """Set how a byte-level BPE splits text before it merges, by the file's name for it, of which
    transformers knows some and takes GPT-2's for the others. Raises ModelError for unknown names.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # older releases
        GGUF_PRE_TOKENIZER_SPLITS = {}
    kind, name = (
        field.contents() if (field := reader.fields.get(f"tokenizer.ggml.{key}")) else None
        for key in ("model", "pre")
    )
    if kind != "gpt2" or name is None or name in _AS_GPT2 | GGUF_PRE_TOKENIZER_SPLITS.keys():
        return
    if name in _DIGITS_APART:
        steps = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    elif name in _AS_QWEN2 and (pattern := GGUF_PRE_TOKENIZER_SPLITS.get("qwen2")):
        within = ByteLevel(add_prefix_space=False, use_regex=False)
        steps = [Split(Regex(pattern), behavior="isolated"), within]
    else:
        problem = f"{path} splits text in a way ({name}) that transformers does not read from it"
        raise ModelError(problem, "Give the folder or Hub id of the model that it was made of.")
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(steps)


def _scale_positions(path: Path, reader: Any, config: Any) -> None:
    """Set how rotary positions are scaled, of which transformers' reader knows nothing: by the
    factors of Llama 3.1 to 3.3. Raises ModelError for others.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    fields = reader.fields.items()
    kind = next((f.contents() for key, f in fields if key.endswith(".rope.scaling.type")), "none")
    if any(name.startswith("rope_factors") for name in tensors):
        kind = "longrope"
    if kind != "none":
        problem = f"{path} scales its positions ({kind}), which transformers does not read from it"
        raise ModelError(problem, "Give the folder or Hub id of the model that it was made of.")
    if (divisors := tensors.get("rope_freqs.weight")) is None:
        return
    plain, stored = dict(config.rope_parameters), torch.from_numpy(divisors.copy())
    initial, theta = ROPE_INIT_FUNCTIONS["llama3"], plain["rope_theta"]
    half = len(stored)
    unscaled = theta ** -(torch.arange(half) / half)
    for context in (2**n for n in range(4, 18)):
        scale = {"factor": float(stored.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scale["original_max_position_embeddings"] = context
        config.rope_parameters = plain | scale | {"rope_type": "llama3"}
        if torch.allclose(unscaled / initial(config, "cpu")[0], stored, rtol=1e-3):
            return
    problem = f"{path} scales its positions in a way that is not that of Llama 3"
    raise ModelError(problem, "Give the folder or Hub id of the model that it was made of.")


def _supported() -> str:
    from gguf.quants import _type_traits

    some = "llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, falcon, stablelm, starcoder2, gpt2"
    kinds = ", ".join(["F32", "F16", *(kind.name for kind in _type_traits)])
    return f"It reads the families {some}, nemotron, quantised as {kinds}."


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
