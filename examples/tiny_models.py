"""Models and a tokenizer for the examples, of random weights; yours come from `from_pretrained`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

# `generation` and `endgeneration` mark the words of the assistant: the tokenizer returns a mask of
# the tokens between them.
CHAT_TEMPLATE = """
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.role == "assistant" -%}
{% generation %}{{ message.content }}<|end|>{% endgeneration %}
{%- else -%}
{{ message.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>", "<|image|>"]


def train_tokenizer(texts: Iterable[str], vocab_size: int = 600) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE, which knows every text; `<|image|>` is its token for pictures."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def make_llama(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """In place of `AutoModelForCausalLM.from_pretrained(...)`."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **SIZES)
    return LlamaForCausalLM(config)


def make_llava(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """Takes pictures of 32 x 32 pixels, and `<|image|>` 16 times for each, once for each patch."""
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(image_size=32, patch_size=8, **SIZES),
        text_config=LlamaConfig(vocab_size=len(tokenizer), **SIZES),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image|>"),
        vision_feature_select_strategy="full",  # SigLIP has no token of a class to drop
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def make_llava_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Resizes pictures to 32 x 32 pixels, and writes `<|image|>` 16 times in place of each one."""
    return LlavaProcessor(
        SiglipImageProcessorPil(size={"height": 32, "width": 32}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="full",
        image_token="<|image|>",
    )
