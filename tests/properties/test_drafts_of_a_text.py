"""A drafter that carries nothing over drafts from the text alone, however the steps cut it and whatever pads them."""

from dataclasses import replace

import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from draft_heads.inference.step import VerifiedStep
from draft_heads.inference.tree import DraftTree
from tests.properties.test_drafters import head_drafters, in_a_sentence, target_of, text_drafters

CAPACITY = 96
tokens = st.one_of(st.integers(3, 5), st.integers(0, 210))
texts = st.lists(tokens, min_size=3, max_size=40)


def whole_step(target, text, layers):
    """What a prefill of all but the last token of `text` tells a drafter; the last one is the base token."""
    rows = torch.tensor(text[:-1])
    index = torch.arange(len(rows))[None]
    hidden, aux_hidden = target.forward_rows(rows[None], torch.ones_like(index), index, layers)
    return VerifiedStep.of_prompt(
        rows, hidden[0], torch.tensor(text[-1:]), None if aux_hidden is None else aux_hidden[0]
    )


def cut(step, start, count, padding):
    """The step that commits `count` tokens from `start` on; `padding` further rows repeat the last of them."""
    index = torch.arange(start, start + count + padding).clamp(max=start + count - 1)
    some = step.map(lambda values: values[:, index] if values.dim() > 1 else torch.tensor([count]))
    return replace(some, tree=DraftTree.empty()) if start else some


@settings(max_examples=4 * settings.default.max_examples)  # there are a dozen kinds of drafters
@given(st.data(), st.sampled_from(["llama", "qwen3"]), st.lists(texts, min_size=1, max_size=2))
@torch.no_grad()
def test_a_draft_depends_on_the_text_alone(data, name, written):
    target = target_of(name)
    try:
        drafter = data.draw(st.one_of(head_drafters(name), text_drafters(name)))
    except ValueError as error:  # options that do not go together
        assert in_a_sentence(error), error
        reject()
    if drafter.carries_over or drafter.reads_choices:
        return
    for text in written:  # the second text starts where the first one's state lies
        whole = whole_step(target, text, drafter.target_layers)
        drafter.begin(0, whole.tokens[0], CAPACITY)
        drafter.observe(whole)
        expected = drafter.propose().map(torch.clone)
        prompt = data.draw(st.integers(1, len(text) - 1))
        drafter.begin(0, whole.tokens[0, :prompt], CAPACITY)
        drafter.observe(cut(whole, 0, prompt, 0))
        done = prompt
        while done < len(text) - 1:
            drafter.propose()  # what it writes after the text is overwritten
            count = min(data.draw(st.integers(1, 5)), len(text) - 1 - done)
            drafter.observe(cut(whole, done, count, data.draw(st.integers(0, 3))))
            done += count
        found = drafter.propose()
        assert found.tokens.tolist() == expected.tokens.tolist() and found.parents.tolist() == expected.parents.tolist()
        assert found.candidate.tolist() == expected.candidate.tolist()
        torch.testing.assert_close(found.log_probs, expected.log_probs)
