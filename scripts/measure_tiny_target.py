"""What a small target can do: its loss on unseen conversations, and its greedy answers to unseen prompts.

`make_tiny_target.py` puts these figures into the model's card and into its last line of output.
"""

import argparse
from contextlib import suppress

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from draft_heads.data.labels.loops import loop_start
from draft_heads.data.synthetic.corpus import questions, word_problems
from draft_heads.data.text.benchmarks import gsm8k_answer
from draft_heads.data.text.conversations import Conversation
from draft_heads.data.text.rendering import ChatRenderer, ConversationError, Extra
from draft_heads.inference.answers import answer_prompts
from draft_heads.inference.target.target import Target

Row = tuple[list[int], list[bool]]  # input ids, which of them the assistant wrote
Placed = tuple[str, Conversation]  # where it stands in its file

MEASURED = {
    "solved_2_step": "unseen two-step word problems solved",
    "solved_1_step": "unseen one-step word problems solved",
    "ended": "greedy answers that end by themselves within 256 tokens",
    "looped": "greedy answers that loop (three copies of a block)",
    "answers": "answers measured",
    "too_long": "prompts that leave no room for an answer",
    "mean_answer_tokens": "tokens per answer",
    "unseen_loss": "cross entropy per answer token, unseen conversations",
}


def loss_of(model: torch.nn.Module, ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the assistant's tokens; right padding is out of causal attention's reach."""
    ids_BL, mask_BL = ids_BL.to(model.device), mask_BL.to(model.device)
    hidden_BLH = model.model(input_ids=ids_BL[:, :-1]).last_hidden_state
    written = mask_BL[:, 1:]
    return cross_entropy(model.lm_head(hidden_BLH[written]).float(), ids_BL[:, 1:][written])


def greedy_answers(
    target: Target, prompts: list[list[dict]], max_new_tokens: int = 256, extras: list[Extra] | None = None
) -> list[list[int]]:
    """Greedy answers to prompts (messages that end with the user's); the tokens up to EOS, EOS included.

    A prompt that leaves no room in the target's positions has an empty one. extras: see `first_questions`.
    """
    renderer = ChatRenderer(target.tokenizer)
    ids = [renderer.prompt(prompt, extra) for prompt, extra in zip(prompts, extras or [None] * len(prompts))]
    rooms = [min(max_new_tokens, target.max_positions - len(row)) for row in ids]
    fitting, limits = [row for row, room in zip(ids, rooms) if room > 0], [room for room in rooms if room > 0]
    answers = iter(answer_prompts(target, fitting, limits, batch_size=50))
    return [next(answers).tokens if room > 0 else [] for room in rooms]


def solved(target: Target, problems: list[dict]) -> tuple[float, list[list[int]]]:
    """(share of word problems whose final number is right, the answers)."""
    answers = greedy_answers(target, [[{"role": "user", "content": row["question"]}] for row in problems])
    texts = [target.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
    right = [gsm8k_answer(text) == gsm8k_answer(row["answer"]) for text, row in zip(texts, problems)]
    return sum(right) / len(right), answers


@torch.inference_mode()
def measure(target: Target, unseen: list[Placed], rows: list[Row], options: argparse.Namespace) -> dict:
    """What the trained model does with unseen prompts; word problems only for the synthetic corpus.

    rows: the `unseen` conversations, rendered
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # decoding one token at a time gains nothing from a second thread
    losses = [loss_of(target.model, *map(torch.tensor, ([ids], [mask]))).item() * sum(mask[1:]) for ids, mask in rows]
    figures = {"unseen_loss": round(sum(losses) / sum(sum(mask[1:]) for _, mask in rows), 4)}
    if options.dataset:
        prompts, extras = first_questions(target.tokenizer, unseen, options)
        answers = greedy_answers(target, prompts, extras=extras)
    else:
        asked = questions(options.questions, options.seed, "heldout")
        answers = greedy_answers(target, [[{"role": "user", "content": row["turns"][0]}] for row in asked])
        for steps in (1, 2):
            problems = word_problems(options.questions, options.seed, "heldout", steps=steps)
            share, worked = solved(target, problems)
            figures |= {f"solved_{steps}_step": round(share, 4)}
            answers += worked
    torch.set_num_threads(threads)
    figures["too_long"] = answers.count([])
    answers = [row for row in answers if row]
    count = max(len(answers), 1)
    return figures | {
        "answers": len(answers),
        "ended": round(sum(row[-1] in target.end_token_ids for row in answers) / count, 4),
        "looped": round(sum(loop_start(row) is not None for row in answers) / count, 4),
        "mean_answer_tokens": round(sum(map(len, answers)) / count, 1),
    }


def first_questions(
    tokenizer: PreTrainedTokenizerFast, unseen: list[Placed], options: argparse.Namespace
) -> tuple[list[list[dict]], list[Extra]]:
    """(messages, the template's further arguments) up to the first answer of the first --questions conversations.

    Bad ones, which `render` has listed, are left out.
    """
    renderer, prompts, extras = ChatRenderer(tokenizer), list[list[dict]](), list[Extra]()
    for _, (messages, extra) in unseen:
        prompt = messages[: next(i for i, message in enumerate(messages) if message["role"] == "assistant")]
        with suppress(ConversationError):
            renderer.prompt(prompt, extra)
            prompts.append(prompt)
            extras.append(extra)
    return prompts[: options.questions], extras[: options.questions]
