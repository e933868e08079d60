"""PyTorch models as their users have them: by their libraries' own configurations, with random weights.

At one of three sizes: :data:`SMALL` for the emulator, :data:`REDUCED` for compute-sanitizer, :data:`REAL` to be timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Size:
    """Set the size of a model and of its inputs; with ``layers`` None it has its usual depth."""

    name: str
    narrow: bool
    layers: int | None
    tokens: int
    image: int
    batch: int


SMALL = Size("small", True, 1, 17, 64, 2)
REDUCED = Size("reduced", False, 1, 64, 96, 2)
REAL = Size("real", False, None, 512, 224, 8)


@dataclass(frozen=True)
class Made:
    """A model with inputs: those that it is exported for, and, where an extent is symbolic, others."""

    module: nn.Module
    inputs: list[torch.Tensor]
    dynamic: dict[str, dict[int, Any]] | None = None
    others: list[torch.Tensor] = field(default_factory=list)


MODELS: dict[str, Callable[[Size], Made]] = {}


def model(make: Callable[[Size], Made]) -> Callable[[Size], Made]:
    """List a model by its function's name."""
    MODELS[make.__name__] = make
    return make


class Picked(nn.Module):
    """A model of transformers as a function of tensors that gives one tensor."""

    def __init__(self, inner: nn.Module, output: str, names: Sequence[str], options: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.output, self.names, self.options = inner, output, names, options

    def forward(self, a: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        """Run it on inputs of the names given, and pick the output."""
        given = (a,) if b is None else (a, b)
        return getattr(self.inner(**dict(zip(self.names, given)), **self.options), self.output)


def pretrained(kind: str, config: str, settings: dict[str, Any]) -> nn.Module:
    """Make a model of transformers of random weights."""
    import_torchvision()
    import transformers

    return getattr(transformers, kind)(getattr(transformers, config)(**settings))


def import_torchvision() -> None:
    """Import torchvision, also one that was built for CUDA beside a torch for the CPU.

    Its library of operators does not load there, and its Python part asks for two of them.
    """
    with contextlib.suppress(RuntimeError):  # where they are defined
        for name in ("nms", "qnms"):
            if not torch._C._dispatch_has_kernel(f"torchvision::{name}") and not torch.cuda.is_available():
                torch.library.define(f"torchvision::{name}", "() -> ()")
    import torchvision  # noqa: F401


def words(vocabulary: int, batch: int, tokens: int) -> torch.Tensor:
    """Draw texts, as numbers of words."""
    return torch.randint(0, vocabulary, (batch, tokens))


def language_model(name: str, size: Size, layers: str, narrow: dict[str, Any], **settings: Any) -> Made:
    """A causal language model of one sequence; its length may be symbolic."""
    settings |= {"use_cache": False}
    if size.layers is not None:
        settings[layers] = size.layers
    if size.narrow:
        settings |= narrow | {"vocab_size": 512}
    inner = pretrained(f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel", f"{name}Config", settings)
    module = Picked(inner, "logits", ["input_ids"], {"use_cache": False})
    vocabulary = inner.config.vocab_size
    sequence = torch.export.Dim.AUTO  # a named one, torch 2.11 refuses by a guard that always holds
    return Made(
        module, [words(vocabulary, 1, size.tokens)], {"a": {1: sequence}}, [words(vocabulary, 1, size.tokens // 2 + 3)]
    )


GROUPED = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@model
def gpt2(size: Size) -> Made:
    """GPT-2 of 124 million parameters."""
    return language_model("GPT2", size, "n_layer", {"n_embd": 128, "n_head": 2})


@model
def llama3_8b_layer(size: Size) -> Made:
    """One layer of Llama 3 8B, with its embedding and head."""
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    return language_model(
        "Llama",
        size,
        "num_hidden_layers",
        GROUPED,
        **{"vocab_size": 128256, "rope_theta": 5e5, "num_hidden_layers": 1} | wide,
    )


@model
def qwen2_0_5b(size: Size) -> Made:
    """Qwen2 of half a billion parameters."""
    wide = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    settings = {"vocab_size": 151936, "tie_word_embeddings": True, "num_hidden_layers": 24} | wide
    return language_model("Qwen2", size, "num_hidden_layers", GROUPED, **settings)


@model
def mamba_layer(size: Size) -> Made:
    """One layer of Mamba, whose scan is written out token by token."""
    settings = {"vocab_size": 50280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 1}
    shorter = Size(size.name, size.narrow, size.layers, min(size.tokens, 64), size.image, size.batch)
    made = language_model("Mamba", shorter, "num_hidden_layers", {"hidden_size": 128}, **settings)
    return Made(made.module, made.inputs)  # its scan is written out, token by token


@model
def bert_base(size: Size) -> Made:
    """BERT, of a batch whose last quarter is padding."""
    settings: dict[str, Any] = {} if size.layers is None else {"num_hidden_layers": size.layers}
    if size.narrow:
        settings |= {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256, "vocab_size": 512}
    inner = pretrained("BertModel", "BertConfig", settings)
    mask = torch.ones(size.batch, size.tokens, dtype=torch.int64)
    mask[:, size.tokens - size.tokens // 4 :] = 0  # padding
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    vocabulary = inner.config.vocab_size
    return Made(
        Picked(inner, "last_hidden_state", ["input_ids", "attention_mask"], {}),
        [words(vocabulary, size.batch, size.tokens), mask],
        {"a": batch, "b": batch},
        [words(vocabulary, 3, size.tokens), mask[:1].expand(3, -1).contiguous()],
    )


@model
def whisper_tiny_encoder(size: Size) -> Made:
    """Whisper's smallest encoder, of two spectrograms."""
    frames = 40 if size.narrow else 128 if size.layers else 3000
    settings = {
        "encoder_layers": size.layers or 4,
        "decoder_layers": 1,
        "max_source_positions": frames // 2,
        "d_model": 128 if size.narrow else 384,
        "encoder_attention_heads": 2 if size.narrow else 6,
        "decoder_attention_heads": 2 if size.narrow else 6,
        "encoder_ffn_dim": 256 if size.narrow else 1536,
    }
    encoder = pretrained("WhisperModel", "WhisperConfig", settings).encoder
    inputs = torch.randn(2, 80, frames)
    return Made(
        Picked(encoder, "last_hidden_state", ["input_features"], {}),
        [inputs],
        {"a": {0: torch.export.Dim("batch", min=2, max=64)}},
        [torch.cat([inputs, inputs[:1].flip(2)])],
    )


def network(inner: nn.Module, size: Size, dynamic: bool = False) -> Made:
    """A network of images; its batch norms have statistics as after training, or values die out."""
    for part in inner.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_var.uniform_(0.5, 1.5)
            part.running_mean.normal_(0, 0.1)
    images = [torch.randn(count, 3, size.image, size.image) for count in (size.batch, 3)]
    batch = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    return Made(inner, images[:1], batch if dynamic else None, images[1:] if dynamic else [])


def of_timm(name: str, **settings: Any) -> nn.Module:
    """Make a network of timm's, of random weights."""
    import_torchvision()
    import timm

    return timm.create_model(name, pretrained=False, **settings)


@model
def vit_b16(size: Size) -> Made:
    """A vision transformer of patches of 16 pixels."""
    settings = {} if size.layers is None else {"depth": size.layers}
    if size.narrow:
        settings |= {"embed_dim": 128, "num_heads": 2, "num_classes": 10}
    return network(of_timm("vit_base_patch16_224", img_size=size.image, **settings), size, dynamic=True)


@model
def convnext_tiny(size: Size) -> Made:
    """ConvNeXt's smallest network."""
    settings: dict[str, Any] = {} if size.layers is None else {"depths": (1, 1, 1, 1)}
    if size.narrow:
        settings |= {"dims": (16, 32, 64, 128), "num_classes": 10}
    return network(of_timm("convnext_tiny", **settings), size)


@model
def resnet50(size: Size) -> Made:
    """ResNet of 50 layers."""
    import_torchvision()
    from torchvision.models import resnet

    layers = [3, 4, 6, 3] if size.layers is None else [1, 1, 1, 1]
    narrow: dict[str, Any] = {"num_classes": 10, "width_per_group": 16} if size.narrow else {}
    return network(resnet.ResNet(resnet.Bottleneck, layers, **narrow), size)


@model
def mobilenet_v2(size: Size) -> Made:
    """MobileNet's second version."""
    import_torchvision()
    from torchvision.models import MobileNetV2

    settings: dict[str, Any] = {"num_classes": 10, "width_mult": 0.25} if size.narrow else {}
    if size.layers is not None:  # widening, channels, repeats, stride
        settings["inverted_residual_setting"] = [[1, 16, 1, 1], [6, 24, 1, 2], [6, 32, 2, 2], [6, 64, 1, 2]]
    return network(MobileNetV2(**settings), size)


@model
def efficientnet_b0(size: Size) -> Made:
    """EfficientNet's smallest network."""
    import_torchvision()
    from torchvision.models import efficientnet

    blocks, _ = efficientnet._efficientnet_conf("efficientnet_b0", width_mult=1.0, depth_mult=1.0)
    if size.layers is not None:
        blocks = [blocks[0], blocks[2]]  # one of 3x3 and one of 5x5, both with squeeze and excitation
        blocks[1].num_layers = 1
        blocks[1].input_channels = blocks[0].out_channels
    narrow: dict[str, Any] = {"num_classes": 10} if size.narrow else {}
    return network(efficientnet.EfficientNet(blocks, 0.2, **narrow), size)


@model
def distilbert_base(size: Size) -> Made:
    """DistilBERT, without a mask."""
    settings: dict[str, Any] = {} if size.layers is None else {"n_layers": size.layers}
    if size.narrow:
        settings |= {"dim": 128, "n_heads": 2, "hidden_dim": 256, "vocab_size": 512}
    return encoder_of_words("DistilBert", size, settings)


@model
def t5_small_encoder(size: Size) -> Made:
    """T5's smallest encoder, whose scores have a bias by position."""
    settings: dict[str, Any] = {} if size.layers is None else {"num_layers": size.layers}
    if size.narrow:
        settings |= {"d_model": 128, "num_heads": 2, "d_ff": 256, "vocab_size": 512}
    return encoder_of_words("T5Encoder", size, settings, "T5Config")


def encoder_of_words(name: str, size: Size, settings: dict[str, Any], config: str = "") -> Made:
    """An encoder of a batch of texts of one length."""
    inner = pretrained(f"{name}Model", config or f"{name}Config", settings)
    return Made(
        Picked(inner, "last_hidden_state", ["input_ids"], {}), [words(inner.config.vocab_size, size.batch, size.tokens)]
    )


@model
def clip_vision_b32(size: Size) -> Made:
    """CLIP's tower of images, of patches of 32 pixels."""
    settings: dict[str, Any] = {"image_size": size.image}
    settings |= {} if size.layers is None else {"num_hidden_layers": size.layers}
    if size.narrow:
        settings |= {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
    inner = pretrained("CLIPVisionModel", "CLIPVisionConfig", settings)
    images = torch.randn(size.batch, 3, size.image, size.image)
    return Made(Picked(inner, "last_hidden_state", ["pixel_values"], {}), [images])


@model
def opt_125m(size: Size) -> Made:
    """OPT of 125 million parameters."""
    narrow = {"hidden_size": 128, "num_attention_heads": 2, "ffn_dim": 256, "word_embed_proj_dim": 128}
    return language_model("OPT", size, "num_hidden_layers", narrow)


@model
def gemma_2b_layer(size: Size) -> Made:
    """One layer of Gemma 2B, with its embedding and head; heads of 256 elements."""
    wide = {"hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8, "num_key_value_heads": 1}
    settings = {"vocab_size": 256000, "num_hidden_layers": 1, "head_dim": 256} | wide
    return language_model("Gemma", size, "num_hidden_layers", GROUPED | {"head_dim": 64}, **settings)


@model
def gemma2_2b_layers(size: Size) -> Made:
    """Two layers of Gemma 2 2B, one of them with a window; scores are capped."""
    wide = {"hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4}
    settings = {"vocab_size": 256000, "head_dim": 256, "sliding_window": 128, "attn_implementation": "eager"} | wide
    two = dataclasses.replace(size, layers=2)
    return language_model(
        "Gemma2", two, "num_hidden_layers", GROUPED | {"head_dim": 64, "sliding_window": 9}, **settings
    )


@model
def mistral_7b_layer(size: Size) -> Made:
    """One layer of Mistral 7B, with its embedding and head; a window of 128 tokens."""
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    settings = {"vocab_size": 32000, "num_hidden_layers": 1, "sliding_window": 128} | wide
    return language_model("Mistral", size, "num_hidden_layers", GROUPED | {"sliding_window": 9}, **settings)


@model
def deit_small(size: Size) -> Made:
    """DeiT of 22 million parameters."""
    settings: dict[str, Any] = {} if size.layers is None else {"depth": size.layers}
    if size.narrow:
        settings |= {"embed_dim": 128, "num_heads": 2, "num_classes": 10}
    return network(of_timm("deit_small_patch16_224", img_size=size.image, **settings), size)


@model
def swin_tiny(size: Size) -> Made:
    """Swin's smallest transformer, whose attention is within windows."""
    settings: dict[str, Any] = {} if size.layers is None else {"depths": (2, 2)}
    if size.narrow:
        settings |= {"embed_dim": 32, "num_heads": (2, 4), "num_classes": 10, "window_size": 4}
    return network(of_timm("swin_tiny_patch4_window7_224", img_size=size.image, **settings), size)


@model
def densenet121(size: Size) -> Made:
    """DenseNet of 121 layers."""
    import_torchvision()
    from torchvision.models import DenseNet

    settings: dict[str, Any] = {} if size.layers is None else {"block_config": (2, 2)}
    if size.narrow:
        settings |= {"growth_rate": 16, "num_init_features": 32, "num_classes": 10}
    return network(DenseNet(**settings), size)


@model
def mixer_b16(size: Size) -> Made:
    """MLP-Mixer, of patches of 16 pixels."""
    import_torchvision()
    from timm.models.mlp_mixer import MlpMixer

    settings: dict[str, Any] = {"patch_size": 16, "num_blocks": size.layers or 12, "embed_dim": 768}
    if size.narrow:
        settings |= {"embed_dim": 128, "num_classes": 10}
    inner = MlpMixer(img_size=size.image, **settings)
    for part in inner.modules():  # some of which timm leaves as memory was
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
            nn.init.zeros_(part.bias)
    return network(inner, size)


class Attention(nn.Module):
    """Compute attention alone in the layout that models use: [batch, tokens, heads, head], inputs and output."""

    def __init__(self, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend from ``query`` [batch, tokens, heads, head] to ``key`` and ``value``, whose heads may be fewer."""
        grouped = key.shape[2] != self.heads
        heads = [each.transpose(1, 2) for each in (query, key, value)]
        found = nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=seen, is_causal=self.causal, enable_gqa=grouped
        )
        return found.transpose(1, 2).flatten(2)


def attention(kind: str, head: int) -> Callable[[Size], Made]:
    """Attention of 16 heads and some 4096 tokens in all; ``grouped``: causal, of 4 heads of keys and values."""

    def of_size(size: Size) -> Made:
        batch, heads = (2, 4) if size.narrow else (max(1, 4096 // size.tokens), 16)
        own = heads // 4 if kind == "grouped" else heads
        inputs = [torch.randn(batch, size.tokens, count, head) for count in (heads, own, own)]
        if kind == "padded":
            seen = torch.ones(batch, 1, 1, size.tokens, dtype=torch.bool)
            seen[..., size.tokens - size.tokens // 4 :] = False
            inputs.append(seen)
        return Made(Attention(heads, kind in ("causal", "grouped")), inputs)

    return of_size


for _kind in ("plain", "causal", "padded", "grouped"):
    for _head in (64, 96, 128):
        MODELS[f"attention_{_kind}_{_head}"] = attention(_kind, _head)


def halved(made: Made) -> Made:
    """Return a model and its inputs in float16."""

    def half(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [each.half() if each.is_floating_point() else each for each in tensors]

    module = made.module.eval().half().requires_grad_(False)
    return Made(module, half(made.inputs), made.dynamic, half(made.others))


def make(name: str, size: Size) -> Made:
    """Make a model in float16, the same each time."""
    torch.manual_seed(0)
    return halved(MODELS[name](size))


def load(text: str, size: Size = REAL) -> tuple[str, Made]:
    """Return a model's name and the model: one of MODELS in float16 at a size, or ``FILE.py:FUNCTION``.

    Such a function returns a module, which gives one tensor, and its inputs, a tuple of tensors, in their own dtypes.

    Raises
    ------
    ValueError : for a name that is none of MODELS, a file without the function, and what is no module with inputs.
    FileNotFoundError : for a file that is not there.
    """
    path, _, function = text.rpartition(":")
    if not path:
        if text not in MODELS:
            raise ValueError(f"no model of ours; name one of {', '.join(MODELS)}, or FILE.py:FUNCTION")
        return text, make(text, size)
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, function, None)):
        raise ValueError(f"{path} has no function {function!r}")
    found = getattr(module, function)()
    whole = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)
    if not (whole and isinstance(found[1], (tuple, list)) and all(isinstance(each, torch.Tensor) for each in found[1])):
        raise ValueError(
            f"{function} returns a {type(found).__name__}, not a module and a tuple of its inputs, tensors"
        )
    return function, Made(found[0].eval(), list(found[1]))
