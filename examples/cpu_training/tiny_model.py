"""Build the policy locally: a random Qwen2 of about 80,000 parameters and a tokenizer of one token per character."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, UNKNOWN, END_OF_TURN, USER, ASSISTANT = SPECIAL_TOKENS = ("<pad>", "<unk>", "<eot>", "<user>", "<asst>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<user>' if message['role'] == 'user' else '<asst>' }}{{ message['content'] }}<eot>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<asst>{% endif %}"
)
"""A later turn starts with the exact tokens of the earlier ones, so that a whole conversation is one training row."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Printable ASCII, one token per character; anything else is `<unk>`."""
    tokens = [*SPECIAL_TOKENS, *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END_OF_TURN,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build(model_dir: Path) -> None:
    """Write tokenizer and randomly initialised model to `model_dir`, in the Hugging Face layout."""
    tokenizer = build_tokenizer()
    vocabulary = tokenizer.get_vocab()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=vocabulary[END_OF_TURN],
            pad_token_id=vocabulary[PAD],
        )
    )
    tokenizer.save_pretrained(model_dir)
    model.save_pretrained(model_dir)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
