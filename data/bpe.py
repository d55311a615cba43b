"""Train a byte-level BPE tokenizer with a chat template that marks the assistant's tokens."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# A word with the space before it, one digit, an operator with its spaces, other punctuation, whitespace. Every digit
# is a token of its own, so that a model can learn arithmetic column by column.
SPLIT_PATTERN = r" ?\p{L}+|\p{N}| [+\-*/=<>] | ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"


def train_tokenizer(
    messages: list[list[dict[str, str]]], vocab_size: int, max_positions: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with one token per digit and a chat template that marks the assistant's tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS, *ROLES.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((m["content"] for row in messages for m in row), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES.values()),
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.name_or_path = "trained here"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
