"""Small models of transformers with random weights, large enough that every token matters."""

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DeiTConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    ViTConfig,
)

from softless import mechanism
from softless.transformers import set_mechanism

VOCABULARY = 50
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}
LOUD = {"initializer_range": 0.3}
GROUPED = {"num_key_value_heads": 2}
CAUSAL = {
    "llama": lambda **more: LlamaConfig(**SIZES, **GROUPED, **LOUD, **TOKENS | more),
    "qwen2": lambda **more: Qwen2Config(**SIZES, **GROUPED, **LOUD, **TOKENS | more),
    "qwen3": lambda **more: Qwen3Config(**SIZES, **GROUPED, **LOUD, head_dim=16, **TOKENS | more),
    "mistral": lambda **more: MistralConfig(**SIZES, **GROUPED, **LOUD, sliding_window=7, **TOKENS | more),
    "gpt2": lambda **more: GPT2Config(n_embd=32, n_layer=3, n_head=4, attn_pdrop=0, **LOUD, **TOKENS | more),
    "gpt_neox": lambda **more: GPTNeoXConfig(**SIZES, **LOUD, **TOKENS | more),
}
WORDS = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
PICTURE = {"image_size": 32, "patch_size": 8}
ENCODERS = {
    "bert": lambda: BertConfig(**SIZES, **WORDS, **LOUD, **TOKENS),
    "roberta": lambda: RobertaConfig(**SIZES, **WORDS, **LOUD, **TOKENS),
    "vit": lambda: ViTConfig(**SIZES, **PICTURE, **LOUD),
    "deit": lambda: DeiTConfig(**SIZES, **PICTURE, **LOUD),
}
# Which mechanism which layers have.
ATTENTIONS = {
    "linear": {None: "linear"},
    "inline": {None: "inline"},
    "delta": {None: "delta"},
    "nearfar": {None: mechanism("nearfar", window=5, first=2)},
    "mixed": {(0, 2): "linear"},
    "mixed the other way": {(1,): "delta"},
    "near, far and softmax": {(0,): mechanism("nearfar", window=9, first=1), (2,): "linear"},
}


def causal(
    name: str = "llama", attention: str = "linear", dtype: torch.dtype = torch.float64, **more
) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CAUSAL[name](**more)).to(dtype).eval()
    for layers, made in ATTENTIONS[attention].items():
        set_mechanism(model, made, layers)
    return model


def encoder(name: str, mechanism: str = "inline") -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModel.from_config(ENCODERS[name]()).double().eval()
    set_mechanism(model, mechanism)
    return model


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    """Token numbers [rows, count], none of them special."""
    return torch.randint(3, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))
