"""Any head inside vLLM: drafts of `num_speculative_tokens` tokens for all running requests in one call a step.

    vllm serve TARGET --speculative-config '{"method": "custom_class",
        "model": "draft_heads.inference.serving.vllm.HeadProposer", "num_speculative_tokens": 4}'
        --additional-config '{"draft_head": "RUN/head"}'

vLLM imports this module in its workers and calls `HeadProposer`, to which it gives no hidden states; so importing it
wraps three methods of vLLM's model runner (`_METHODS`). vLLM verifies the drafts and decides every token itself.

`additional_config`: draft_head, the head's folder or hub id; draft_context, tokens of a request's text that the head
keeps keys and values of (default: `max_model_len`), for `max_num_seqs` requests.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draft_heads.configs.options import check_whole
from draft_heads.heads.base import DraftHead, TargetView
from draft_heads.heads.checkpoint import load_head
from draft_heads.inference.drafters.heads.fast_weights import prepare_for_drafting
from draft_heads.inference.drafters.registry import HEAD_DRAFTERS
from draft_heads.inference.serving.request_drafter import ReadTokens, RequestDrafter
from draft_heads.inference.target.linear import DraftingView
from draft_heads.inference.target.target import Target

TRIED = "0.32"
"""The version of vLLM that `make check-engines` runs."""

_METHODS = {
    "propose_draft_token_ids": ("scheduler_output", "hidden_states", "aux_hidden_states", "common_attn_metadata"),
    "_input_fits_in_drafter": ("common_attn_metadata",),
    "_setup_eagle3_aux_hidden_state_outputs": (),
}
"""Methods of vLLM's `GPUModelRunner` that are wrapped, and the arguments that are read."""


_OPTIONS = ("draft_head", "draft_context")
"""Keys of `additional_config`."""


class _Step(NamedTuple):
    """A step of the runner: states [N, H], and [N, H] of each of k layers; the first row of each request, and N; how
    many tokens to draft."""

    runner: Any
    hidden: Tensor
    aux_hidden: list[Tensor] | None
    first_rows: list[int]
    tokens: int


class HeadProposer:
    """vLLM's interface of a custom proposer: made from its configuration, then `load_model`, then `propose` a step."""

    def __init__(self, vllm_config: Any) -> None:
        """ValueError for a configuration that a head cannot draft in."""
        logger = _logger()
        _check_methods(logger)
        options = dict(vllm_config.additional_config or {})
        path = options.get("draft_head")
        if not isinstance(path, str) or not path:
            raise ValueError(
                f"HeadProposer needs the folder or hub id of a head; additional_config has draft_head={path!r}; pass "
                '--additional-config \'{"draft_head": "RUN/head"}\''
            )
        if unknown := sorted(name for name in options if name.startswith("draft_") and name not in _OPTIONS):
            raise ValueError(
                f"additional_config has draft_head and draft_context for HeadProposer; got {unknown[0]}; rename it or "
                "leave it out"
            )
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ValueError(
                "a head drafts where the embedding and the LM head are, in one process; got pipeline_parallel_size "
                f"{parallel.pipeline_parallel_size}; set it to 1 and use --tensor-parallel-size"
            )
        model = vllm_config.model_config
        if revision := getattr(model, "revision", None):
            raise ValueError(
                f"a head is compared with the files of the model that is served, the newest in the cache; got revision "
                f"{revision}; serve the folder of that revision"
            )
        self._path, self._logger, self._options = path, logger, vllm_config.additional_config
        self._whole = parallel.tensor_parallel_size == 1
        self._target = model.model
        self._dtype = model.dtype
        self._limit = int(model.max_model_len)
        speculative = vllm_config.speculative_config
        self._tokens = int(speculative.num_speculative_tokens)
        self._by_batch = bool(getattr(speculative, "num_speculative_tokens_per_batch_size", None))
        self._context = options.get("draft_context", self._limit)
        if "draft_context" in options:  # of a text that is longer, half is kept: room for a step of it and its drafts
            least = 2 * (self._tokens + 1)
            check_whole("draft_context", self._context, least, "leave it out for max_model_len")
        self._requests = int(vllm_config.scheduler_config.max_num_seqs)
        self._cached_prefix = False
        self._step: _Step | None = None
        self.layers: tuple[int, ...] = ()

    def load_model(self, target_model: nn.Module) -> None:
        """Load the head for the model that is served; ValueError where it is not the one that the head was made for."""
        device = next(target_model.parameters()).device
        files = Target.from_pretrained(self._target, self._dtype, lend_to=torch.device("cpu"))
        known = files.fingerprint()
        template = known.pop("chat_template_hash")  # vLLM renders, with the model's template or one that it is given
        head = load_head(self._path, known).to(device, self._dtype)
        if head.config.target_fingerprint.get("chat_template_hash", template) != template:
            self._logger.warning(
                "%s learned from another chat template than the model's own, or one with settings; serve it with "
                "--chat-template, or --default-chat-template-kwargs",
                self._path,
            )
        files.check_layers(head.config.target_layers)
        self.layers = tuple(head.config.target_layers)
        # what vLLM compiles depends on them, and so must its cache
        self._options["layers_for_draft_head"] = list(self.layers)
        view = self._view(target_model, files, device)
        self.drafts = RequestDrafter(self._drafter(head, view), min(self._context, self._limit))
        depth = self.drafts.depth
        self._logger.info(
            "drafting with %s, a %s head: %d tokens a step for up to %d requests of %d tokens, %.2f GiB",
            self._path,
            head.config.kind,
            depth,
            self._requests,
            min(self._context, self._limit),
            self.drafts.bytes / 2**30,
        )
        if depth < self._tokens:
            self._logger.warning(
                "num_speculative_tokens is %d and this head drafts %d; vLLM plans a step for what is asked for",
                self._tokens,
                depth,
            )

    def _drafter(self, head: DraftHead, view: TargetView) -> Any:
        kind = HEAD_DRAFTERS[head.config.kind]
        head = prepare_for_drafting(head)
        if kind.reads_lm_head:
            view = DraftingView.of(head.draft_view(view))
        return kind(head, view, self._tokens, self._requests, tree="chain")

    def _view(self, model: Any, files: Target, device: torch.device) -> TargetView:
        """The embedding and LM head of the model that is served, or their copies from its files where it has them in
        parts or scaled."""
        language: Any = model.get_language_model() if hasattr(model, "get_language_model") else model
        own = files.view()
        lm_head = getattr(language, "lm_head", None)
        lm_head = getattr(lm_head, "base_layer", lm_head)  # of a model that adapters change
        kind = type(getattr(lm_head, "quant_method", None)).__name__
        if lm_head is not None and not kind.startswith(("Unquantized", "NoneType")):
            raise ValueError(
                f"a head drafts with the target's LM head, which must not be quantised; {self._target} has one of "
                f"{kind}; serve a checkpoint whose LM head is left as it is"
            )
        ids = torch.arange(0, files.vocab_size, max(1, files.vocab_size // 64))
        embedding: Any = getattr(getattr(language, "model", None), "embed_tokens", None)
        embedding = getattr(embedding, "base_layer", embedding)
        weight: Any = getattr(lm_head, "weight", None)
        alike = self._whole and embedding is not None and weight is not None
        if alike:
            with torch.inference_mode():
                same = torch.allclose(
                    embedding(ids.to(device)).cpu().float(), own.embed(ids).float(), atol=1e-2, rtol=1e-2
                )
                same &= torch.equal(weight[: files.vocab_size][ids.to(device)].cpu(), own.lm_head_weight[ids])
            alike = bool(same)
        if not alike:
            self._logger.info("drafting with copies of the embedding and the LM head in the model's files")
            weight, embedding = own.lm_head_weight.to(device, self._dtype), files.embedding.to(device, self._dtype)
        bias = None if own.lm_head_bias is None else own.lm_head_bias.to(device, self._dtype)
        return TargetView(embedding, weight[: files.vocab_size], bias, None, own.rule)

    def take_step(
        self, runner: Any, scheduled: Any, hidden: Tensor, aux_hidden: list[Tensor] | None, metadata: Any
    ) -> None:
        """What the next `propose` reads: the step's states, where each request's rows begin, and what vLLM has
        scheduled, which may be fewer tokens for a large batch."""
        tokens = int(scheduled.num_spec_tokens_to_schedule) if self._by_batch else self._tokens
        self._step = _Step(runner, hidden, aux_hidden, metadata.query_start_loc_cpu.tolist(), tokens)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """The drafts for each request, in the order of vLLM's batch; [] for one whose prompt is not read to its end."""
        assert self._step is not None
        runner, hidden, aux_hidden, rows, asked = self._step
        self._step = None
        batch = runner.input_batch
        requests = []
        for index, sampled in enumerate(sampled_token_ids):
            start = int(batch.num_computed_tokens_cpu[index])
            known = int(num_tokens_no_spec[index])
            # the states of rejected drafts are of no use, and the newest token has none yet
            end = min(start + rows[index + 1] - rows[index], known - 1)
            tokens = token_ids_cpu[index, start : end + 1].tolist() if end > start else []
            requests.append(ReadTokens(batch.req_ids[index], start, tokens, rows[index], bool(sampled) and asked > 0))
            if start and not self._cached_prefix and batch.req_ids[index] not in self.drafts:
                self._cached_prefix = True
                self._logger.info(
                    "the head begins after the first %d tokens of a request, whose states it was not given (a cache of "
                    "prefixes, a preemption): fewer of its drafts may be accepted (said once)",
                    start,
                )
        self.drafts.forget(runner.requests)
        aux = None if not self.layers or aux_hidden is None else torch.cat(aux_hidden, dim=-1)
        drafts = self.drafts.draft(requests, hidden, aux)
        left = (self._limit - int(known) - 1 for known in num_tokens_no_spec)
        return [chain[: max(0, min(asked, room))] for chain, room in zip(drafts, left)]


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.draft_heads")


def _check_methods(logger: Any) -> None:
    """ValueError for a vLLM whose runner lacks what is wrapped; one line for a version that was not tried."""
    import vllm
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for name, arguments in _METHODS.items():
        method = inspect.unwrap(getattr(GPUModelRunner, name, lambda: None))
        if missing := [argument for argument in arguments if argument not in inspect.signature(method).parameters]:
            raise ValueError(
                f"HeadProposer reads {', '.join(missing)} of vLLM's {name}; vLLM {vllm.__version__} has none; use "
                f"vLLM {TRIED}"
            )
    if not vllm.__version__.startswith(f"{TRIED}."):
        logger.warning("HeadProposer was tried with vLLM %s; this is %s", TRIED, vllm.__version__)


def _wrap_runner() -> None:
    """Let vLLM's model runner give its states to a `HeadProposer`."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def wrapped(name: str, around: Callable[..., Any]) -> None:
        inner = getattr(GPUModelRunner, name, None)
        if inner is None or hasattr(inner, "gives_to_heads"):
            return

        @functools.wraps(inner)
        def outer(runner: Any, *args: Any, **kwargs: Any) -> Any:
            drafter = getattr(runner, "drafter", None)
            if not isinstance(drafter, HeadProposer):
                return inner(runner, *args, **kwargs)
            return around(functools.partial(inner, runner), runner, drafter, *args, **kwargs)

        outer.gives_to_heads = True  # type: ignore[attr-defined]
        setattr(GPUModelRunner, name, outer)

    signature = inspect.signature(GPUModelRunner.propose_draft_token_ids)

    def propose(inner: Any, runner: Any, drafter: HeadProposer, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(runner, *args, **kwargs).arguments
        names = ("scheduler_output", "hidden_states", "aux_hidden_states", "common_attn_metadata")
        drafter.take_step(runner, *(given[name] for name in names))
        return inner(*args, **kwargs)

    def fits(inner: Any, runner: Any, drafter: HeadProposer, common_attn_metadata: Any) -> bool:
        return common_attn_metadata is not None  # a step that is not drafted in would be missed; `propose` cuts drafts

    def set_up(inner: Any, runner: Any, drafter: HeadProposer) -> None:
        if drafter.layers:
            runner.use_aux_hidden_state_outputs = True
            _set_layers(runner.get_model(), drafter.layers)

    wrapped("propose_draft_token_ids", propose)
    wrapped("_input_fits_in_drafter", fits)
    wrapped("_setup_eagle3_aux_hidden_state_outputs", set_up)


def _set_layers(model: Any, layers: Sequence[int]) -> None:
    if not hasattr(model, "set_aux_hidden_state_layers"):
        raise ValueError(
            f"the head reads layers {list(layers)} of the target, and vLLM gives no layers' outputs of "
            f"{type(model).__name__}; serve another architecture, or train without --target_layers"
        )
    model.set_aux_hidden_state_layers(tuple(layers))


if find_spec("vllm") is not None:
    _wrap_runner()
