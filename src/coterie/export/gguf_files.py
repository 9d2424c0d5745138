"""Files of llama.cpp: a base that repeats every MLP once for each expert, with its tokenizer, and
for each client a LoRA on it. The router is in the client's file too, as a LoRA on a gate of zeros.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from coterie.core.errors import ExportError, ModelError, Refused
from coterie.export.format import ClientModel, Serving
from coterie.export.layers import FAMILY, base_tensors, gate_of, head_width, updates
from coterie.models.adapter import AdapterBlock
from coterie.personal import PersonalModel

ENDS = ("eos", "eot", "eom")  # the end of a text, a turn and a message: llama.cpp stops at each
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's kinds of tokens
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's names by the steps in tokenizer.json: whether digits are split, and the pattern
SPLITS = {
    (False, _GPT2): "gpt-2",
    (True, _GPT2): "smollm",
    (False, _WORDS % "{1,3}"): "llama-bpe",
    (False, _WORDS % ""): "qwen2",
}


@dataclass(frozen=True)
class Tokens:
    """The tokens of a byte-level BPE."""

    texts: list[str]  # by id; ids beyond the tokenizer's are unused
    kinds: list[int]  # llama.cpp's, by id
    merges: list[str]  # in order
    split: str  # llama.cpp's name of the pattern that splits text first

    @classmethod
    def of(cls, tokenizer: Any, size: int) -> "Tokens":
        """Return the tokens of a tokenizer, for a base with `size` tokens. Raises Refused if the
        tokenizer is of another kind, or splits text in a way that llama.cpp does not know.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        description = json.loads(backend.to_str()) if backend is not None else {}
        model = description.get("model", {})
        split = _split(description)
        merges = model.get("merges")
        if model.get("type") != "BPE" or model.get("byte_fallback") or not merges or not split:
            raise Refused(
                "the base's tokenizer is none that can be written for llama.cpp here: a byte-level "
                "BPE that splits text as GPT-2, SmolLM, Llama 3 or Qwen 2 does",
                "Use --format mixtral, whose checkpoint llama.cpp's own convert_hf_to_gguf.py "
                "reads, or --format peft.",
            )
        ids = [*model["vocab"].values(), *(token["id"] for token in description["added_tokens"])]
        if not 0 <= min(ids, default=0) <= max(ids, default=0) < size:
            raise Refused(
                f"the base's tokenizer has tokens from {min(ids)} to {max(ids)}, and the base "
                f"{size}",
                "The tokenizer belongs to another base: get both again.",
            )
        texts = [f"[UNUSED{i}]" for i in range(size)]
        kinds = [UNUSED] * size
        for text, i in model["vocab"].items():
            texts[i], kinds[i] = text, NORMAL
        for token in description["added_tokens"]:
            texts[token["id"]] = token["content"]
            kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
        pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
        return cls(texts, kinds, pairs, split)

    def write(self, writer: Any, serving: Serving) -> None:
        """Write the tokens, the special tokens and the chat template to a file of llama.cpp."""
        ends = end_tokens(serving)
        kinds = [CONTROL if i in ends.values() else kind for i, kind in enumerate(self.kinds)]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(self.texts)
        writer.add_token_types(kinds)
        writer.add_token_merges(self.merges)
        tokenizer = serving.tokenizer
        others = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad", "unk")}
        for name, token in (others | ends).items():
            if token is not None:
                getattr(writer, f"add_{name}_token_id")(token)
        # llama.cpp strips this token from a template's text, and then puts it first
        first = (serving.prompt or serving.begin)[:1]
        writer.add_add_bos_token(first == (tokenizer.bos_token_id,))
        writer.add_add_eos_token(False)
        if isinstance(tokenizer.chat_template, str):
            writer.add_chat_template(tokenizer.chat_template)


def end_tokens(serving: Serving) -> dict[str, int]:
    """Return the tokens that end a text by llama.cpp's names. Raises Refused for too many."""
    end = serving.tokenizer.eos_token_id
    stops = sorted(serving.stops, key=lambda stop: stop != end)  # the end of a text first
    if len(stops) > len(ENDS):
        raise Refused(
            f"llama.cpp has names for {len(ENDS)} tokens that end an answer, and the base has "
            f"{len(stops)}",
            "Use --format mixtral or --format peft.",
        )
    return dict(zip(ENDS, stops, strict=False))


def check_serving(serving: Serving) -> None:
    """Check that llama.cpp knows how texts begin and end. Raises Refused."""
    end_tokens(serving)
    if not serving.prompt and serving.begin not in ((), (serving.tokenizer.bos_token_id,)):
        begin = serving.tokenizer.decode(list(serving.begin))
        raise Refused(
            f"the base's texts begin with {begin!r}, and llama.cpp puts its beginning token or "
            f"nothing before a text",
            "Use --format mixtral or --format peft.",
        )


def _split(description: dict[str, Any]) -> str:
    """Return llama.cpp's name of the way a tokenizer.json splits text; "" without a name."""
    # accepted, though llama.cpp leaves it out
    normalizer = (description.get("normalizer") or {}).get("type", "NFC")
    pre_tokenizer = description.get("pre_tokenizer") or {}
    steps = (
        pre_tokenizer["pretokenizers"]
        if pre_tokenizer.get("type") == "Sequence"
        else [pre_tokenizer]
    )
    kinds = [step.get("type") for step in steps]
    last = steps[-1]
    if normalizer != "NFC" or kinds[-1] != "ByteLevel" or last.get("add_prefix_space"):
        return ""
    digits, pattern = False, _GPT2 if last.get("use_regex", True) else ""
    for step in steps[:-1]:
        if step["type"] == "Digits" and step.get("individual_digits"):
            digits = True
        elif step["type"] == "Split" and not pattern:
            pattern = step["pattern"].get("Regex", "")
        else:
            return ""
    return SPLITS.get((digits, pattern), "")


Values = npt.NDArray[Any]
ATTENTION = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    f"{FAMILY.attention}.q_norm": "attn_q_norm",
    f"{FAMILY.attention}.k_norm": "attn_k_norm",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# llama.cpp's names of architectures, without and with experts. In "llama" the two halves of each
# rotated head are interleaved.
ARCHITECTURES = {
    "llama": ("llama", "llama"),
    "mistral": ("llama", "llama"),
    "qwen3": ("qwen3", "qwen3moe"),
}
DTYPES: dict[str, Any] = {"f32": np.float32, "f16": np.float16}
BLOCK = 32  # adjacent weights of a row that share one scale, in Q8_0 and Q4_0


def layer_names(kind: str, experts: int) -> Mapping[str, str]:
    """Return llama.cpp's names of the layers in a block, by the base's names."""
    last = "" if experts == 1 else "_exps"
    mlp = {f"mlp.{theirs}": f"ffn_{ours}{last}" for ours, theirs in FAMILY.mlp.items()}
    attention = {f"{FAMILY.attention}.{name}": theirs for name, theirs in ATTENTION.items()}
    norms = {
        n: t for n, t in NORMS.items() if kind == "qwen3" or not n.endswith(("q_norm", "k_norm"))
    }
    return mlp | attention | norms


def unknown_tensors(model: PersonalModel) -> list[str]:
    """Return the base's tensors that llama.cpp does not know."""
    layers = layer_names(model.config.model_type, model.layout.experts)
    blocks = range(len(model.adapter.blocks))
    known = {f"{FAMILY.blocks}.{i}.{name}.weight" for i in blocks for name in layers}
    return sorted(base_tensors(model).keys() - known - WHOLE.keys())


def undividable(model: PersonalModel) -> list[str]:
    """Return the layers, with their widths, whose rows cannot be quantised in blocks of 32."""
    shape = model.backbone.architecture.blocks[0]
    linears = [*shape.attention, *shape.mlp]
    return [f"{one.name} ({one.inputs})" for one in linears if one.inputs % BLOCK]


def context_length(model: PersonalModel) -> int:
    """Return the most tokens for llama.cpp: at most a sliding window, which it would ignore."""
    longest: int = model.config.max_position_embeddings
    return min(longest, getattr(model.config, "sliding_window", None) or longest)


def rope_factors(model: PersonalModel) -> Values | None:
    """Return llama.cpp's divisors of the rotary frequencies, (head / 2,); None if all are 1."""
    frequencies = model.backbone.model.model.rotary_emb.inv_freq.cpu().double().numpy()
    theta = float(model.config.rope_parameters["rope_theta"])
    plain = theta ** -(np.arange(len(frequencies)) / len(frequencies))
    factors = (plain / frequencies).astype(np.float32)
    return None if np.allclose(factors, 1, rtol=1e-4) else factors


def write_base(path: Path, client: ClientModel, precision: str) -> None:
    """Write the base for all models of one layout, with each MLP repeated for each expert."""
    import gguf

    model = client.model
    experts, kind = model.layout.experts, model.config.model_type
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[kind][experts > 1], use_temp_file=True)
    _describe(writer, model, precision)
    Tokens.of(model.tokenizer, model.config.vocab_size).write(writer, client.serving)
    layers = layer_names(kind, experts)
    tensors = base_tensors(model)
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        if name in WHOLE:
            _add(writer, WHOLE[name], _values(tensor), precision)
            continue
        block, _, layer = name.removeprefix(f"{FAMILY.blocks}.").partition(".")
        layer = layer.removesuffix(".weight")
        values = _interleaved(_values(tensor), layer, model)
        if layers[layer].endswith("_exps"):
            values = np.broadcast_to(values, (experts, *values.shape))
        _add(writer, f"blk.{block}.{layers[layer]}.weight", values, precision)
    for i in range(len(model.adapter.blocks) * (experts > 1)):
        gate = np.zeros((experts, model.config.hidden_size), np.float32)
        writer.add_tensor(f"blk.{i}.ffn_gate_inp.weight", gate)
    if (factors := rope_factors(model)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    _finish(writer)


def write_client(path: Path, model: PersonalModel, precision: str) -> None:
    """Write the file of one client: its attention updates, its experts and its router."""
    import gguf

    experts, kind = model.layout.experts, model.config.model_type
    writer = gguf.GGUFWriter(str(path), ARCHITECTURES[kind][experts > 1])
    writer.add_type("adapter")
    writer.add_name(model.about.client)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 0.0)  # B already has the scale
    layers = layer_names(kind, experts)
    dtype = DTYPES.get(precision, np.float16)
    for i, block in enumerate(cast(Iterable[AdapterBlock], model.adapter.blocks)):
        for layer, factors in updates(block).items():
            A, B = (each[0] if experts == 1 and each.ndim > 2 else each for each in factors)
            name = f"blk.{i}.{layers[layer]}.weight"
            writer.add_tensor(f"{name}.lora_a", _within(name, _values(A), precision).astype(dtype))
            up = _within(name, _interleaved(_values(B), layer, model), precision)
            writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(up).astype(dtype))
        if model.layout.routed:
            name = f"blk.{i}.ffn_gate_inp.weight"
            writer.add_tensor(f"{name}.lora_a", _values(gate_of(block, experts)))
            writer.add_tensor(f"{name}.lora_b", np.eye(experts, dtype=np.float32))
    _finish(writer)


def _describe(writer: Any, model: PersonalModel, precision: str) -> None:
    """Write the sizes and settings of a base."""
    import gguf

    config, layout = model.config, model.layout
    heads = config.num_attention_heads
    head = head_width(config)
    writer.add_name(str(config.model_type))
    writer.add_context_length(context_length(model))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    theta = float(config.rope_parameters["rope_theta"])
    for name, scale in (("rope_theta", theta), ("rms_norm_eps", config.rms_norm_eps)):
        if not 0 < scale <= np.finfo(np.float32).max:
            raise ModelError(f"the base's {name} is {scale:g}", "Get the base again.")
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    kind = "ALL_F32" if precision == "f32" else f"MOSTLY_{precision.upper()}"
    writer.add_file_type(gguf.LlamaFileType[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if layout.experts > 1:
        writer.add_expert_count(layout.experts)
        writer.add_expert_used_count(layout.active)
        writer.add_expert_feed_forward_length(config.intermediate_size)


def _add(writer: Any, name: str, values: Values, precision: str) -> None:
    """Add a tensor of a base: norms in fp32, matrices in the given precision."""
    import gguf

    precision = "f32" if values.ndim == 1 else precision
    values = _within(name, values, precision)
    if precision in DTYPES:
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=DTYPES[precision]))
        return
    # small bases use the embeddings as output layer too, which needs more precision
    whole = "Q8_0" if name in WHOLE.values() else precision.upper()
    kind = gguf.GGMLQuantizationType[whole]
    quantized = gguf.quants.quantize(np.ascontiguousarray(values), kind)
    writer.add_tensor(name, quantized, raw_dtype=kind)


def _within(name: str, values: Values, precision: str) -> Values:
    """Return values, if in the range of a precision (scales are fp16). Raises ExportError."""
    most = np.finfo(DTYPES.get(precision, np.float16)).max
    # negated, so that NaN is refused too
    if not (np.abs(values).max(initial=0) <= most):
        problem = f"{name} has values that are not within ±{most:g}, which {precision} can hold"
        raise ExportError(problem, "Export it in f32, or train it again.")
    return values


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(values: Values, layer: str, model: PersonalModel) -> Values:
    """Return the rows of queries and keys in the order of llama.cpp's "llama": (out, ...)."""
    config = model.config
    if ARCHITECTURES[config.model_type][0] != "llama":
        return values
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(layer.rpartition(".")[2])
    if count is None:
        return values
    halves = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _values(tensor: Tensor) -> Values:
    return tensor.detach().float().cpu().contiguous().numpy()
