"""DraftHeadTrainer: transformers' Trainer around a frozen target that stays outside of model and optimizer.

One training step, in the order in which transformers' loop calls the methods below:

1. `get_train_dataloader`      rows → batches, one per process and micro-batch
2. `_get_num_items_in_batch`   the windows of the global batch: all micro-batches, all processes
3. `compute_loss`              target → hidden states; head → sum of losses over windows; sum / windows of 2.
4. `_clip_grad_norm`, then a step of what `create_optimizer` and `create_scheduler` made
5. the callbacks of `stopping`, then `log`, `evaluate`, a checkpoint where they are due

As 3. divides by the windows of the global batch, the loss is the same on one process and on many, with and without
gradient accumulation.
"""

from __future__ import annotations

import math
import time
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, ProgressCallback, Trainer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from draft_heads.data.collate import DraftCollator, row_lengths
from draft_heads.heads.base import DraftHead, HeadLoss
from draft_heads.inference.evaluation.meter import devices_of
from draft_heads.inference.target import sharded
from draft_heads.inference.target.sizes import weights_per_token
from draft_heads.inference.target.target import Target
from draft_heads.train.batches import EpochSampler, RowBatches, TokenBatches, leave_signals_to_trainer
from draft_heads.train.checkpoints import MarkComplete, SoundBest, read_marker, step_of
from draft_heads.train.held_out import loss_metrics, simulation_metrics
from draft_heads.train.log import LogLastStep, LogMetrics, check_losses, progress_callback
from draft_heads.train.optimizer import MuonWithAdamW
from draft_heads.train.schedule import wall_time_scheduler
from draft_heads.train.stopping import Patience, StopOnSigterm, WallClock
from draft_heads.train.training_arguments import HeadTrainingArguments


class DraftHeadTrainer(Trainer):
    """Trains a `DraftHead`; metrics are per window and per label offset, and simulated β.

    simulate_dataset: rows along which simulated β is measured, with trees of `simulate_nodes`; None: not at all.
    """

    model: DraftHead
    args: HeadTrainingArguments
    data_collator: Any  # a `DraftCollator`
    train_dataset: Any

    def __init__(
        self,
        head: DraftHead,
        target: Target,
        args: HeadTrainingArguments,
        collator: DraftCollator,
        train_dataset: Any,
        eval_dataset: Any,
        simulate_dataset: Any = None,
        simulate_nodes: int = 32,
    ) -> None:
        self.target = target
        self.view = target.view()
        self.clock = WallClock(args.max_minutes)
        self.simulate_dataset = simulate_dataset
        self.simulate_nodes = simulate_nodes
        self._simulation = {
            "simulate_rows": float(len(simulate_dataset or ())),
            "simulate_nodes": float(simulate_nodes),
        }
        self._evaluated_until = -1  # evaluations up to this step had another simulation
        self.sigterm = StopOnSigterm()
        self.trained = False  # training has ended
        self.final_metrics: dict[str, float] = {}
        self.programs: list[dict[str, Any]] = []  # that trained the head, each with the step from which it did
        self._metrics = LogMetrics()
        self._order: EpochSampler | None = None  # of the training rows
        self._loss_sum = torch.zeros(2, dtype=torch.float64)  # of this process's windows, and how many these are
        self._loss_before = torch.zeros(2, dtype=torch.float64)  # the same of all processes before a resume
        limit, args.save_total_limit = args.save_total_limit, None  # transformers would go by the folders' time stamps
        self._saved = MarkComplete(self._progress, limit)
        super().__init__(
            model=head,
            args=args,
            data_collator=collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=[self.sigterm, self.clock, LogLastStep(), self._saved, SoundBest()],
        )
        if is_deepspeed_zero3_enabled():
            sharded.gather_until_step(head)
        self._patience = Patience(args.patience) if args.patience else None
        if self._patience is not None:
            self.add_callback(self._patience)
        self.remove_callback(PrinterCallback if args.disable_tqdm else ProgressCallback)
        self.add_callback(progress_callback(args, self.clock))
        # `compute_loss` divides by the windows of the whole accumulated batch; without this transformers, 5.17 to
        # 5.24, would divide by the number of micro-batches once more
        self.model_accepts_loss_kwargs = True

    @property
    def longest(self) -> int:
        """Tokens of a row that are trained on; the rest is cut."""
        return int(self.data_collator.max_length)

    # --- before training --------------------------------------------------------------------------------------------

    def start_head(self, rows: int = 8) -> None:
        """Give the head the start values that depend on the target, from a few rows of the training data.

        Raises ValueError if no row has a token to train on after a base token, or none a window for this head.
        """
        order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(0))  # not by length
        any_row = map(self.train_dataset.__getitem__, order.tolist())
        trained = (row for row in any_row if sum(row["assistant_mask"][: self.longest]) > 1)
        if not (first := list(islice(trained, rows))):
            raise ValueError(
                f"training needs rows with an answer of two tokens or more within --max_length {self.longest}; none "
                f"of {len(self.train_dataset):,} has one; raise it, or distil longer answers"
            )
        batch = self.data_collator(first)
        if not self._windows(batch):
            self._check_windows(order.tolist(), rows)
        batch = {name: value.to(self.target.device) for name, value in batch.items()}
        states = self.target.states_of(batch, self.model.config.target_layers)
        hidden, *aux_hidden = (values[batch["mask"]] for values in states.values())
        with self.target.whole_layers():
            self.model.to(self.target.device).start_from(hidden, self.view, *aux_hidden)

    def _windows(self, batch: dict[str, Any]) -> int:
        return int(self.model.count_windows(**{name: x for name, x in batch.items() if "hidden" not in name}))

    def _check_windows(self, order: list[int], rows: int) -> None:
        """ValueError if no row has a window; asked of `rows` at a time, up to the first with one."""
        for start in range(0, len(order), rows):
            if self._windows(self.data_collator([self.train_dataset[row] for row in order[start : start + rows]])):
                return
        raise ValueError(
            f"training needs windows of labels; {self.model.config.title} found none in {len(order):,} rows within "
            f"--max_length {self.longest}; distil with --labels generate, so that the text is the target's own, or "
            "longer answers"
        )

    def resume(self, checkpoint: Path) -> None:
        """Go on from the minutes and the sum of losses in a checkpoint's marker."""
        marker = read_marker(checkpoint)
        self.clock.resume(marker)
        if self._simulation != {name: marker.get(name, value) for name, value in self._simulation.items()}:
            self._evaluated_until = step_of(checkpoint)
        self._loss_before = torch.tensor(marker.get("losses", [math.nan, 0]), dtype=torch.float64)

    # --- 1. batches -------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """The processes' shares are cut here: accelerate would fill an epoch's last step up with rows of its first."""
        args, batches = self.args, self._row_batches()
        self._order = batches.sampler
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            worker_init_fn=leave_signals_to_trainer,
            generator=torch.Generator(),  # an epoch draws a seed from it, and nothing from what dropout draws from
        )
        return self.accelerator.prepare(loader)

    def _row_batches(self) -> RowBatches | TokenBatches:
        """Batches of `per_device_train_batch_size` rows, or of rows of similar length with `tokens_per_batch`."""
        args, rows = self.args, self.train_dataset
        seed = args.seed if args.data_seed is None else args.data_seed
        if args.tokens_per_batch:
            lengths = [min(length, self.longest) for length in row_lengths(rows)]
            return TokenBatches(lengths, args.tokens_per_batch, seed, args.world_size)
        size = args.per_device_train_batch_size
        return RowBatches(len(rows), size, seed, args.world_size, args.dataloader_drop_last)

    # --- 2., 3. loss ------------------------------------------------------------------------------------------------

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        """Windows of the global batch: all micro-batches of the step, all processes."""
        count = torch.zeros((), dtype=torch.long, device=device)
        for batch in batch_samples:
            inputs = {name: value.to(device) for name, value in batch.items() if "hidden" not in name}
            count += self.model.count_windows(seed=self.state.global_step, **inputs)
        return self.accelerator.reduce(count)

    def head_loss(self, model: nn.Module, batch: dict[str, Tensor], seed: int = 0) -> HeadLoss:
        """The head's loss on a batch of the collator, hidden states taken from the batch or from the target."""
        states = self.target.states_of(batch, self.model.config.target_layers)
        return model(**{**batch, **states}, target=self.view, seed=seed)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        loss = self.head_loss(model, inputs, seed=self.state.global_step)
        windows = loss.windows if num_items_in_batch is None else num_items_in_batch
        # times the processes, as DDP averages over them; no host synchronisation
        mean = loss.total * self.args.world_size / torch.as_tensor(windows).clamp(min=1)
        self._metrics.add(loss, mean.detach(), inputs["input_ids"], inputs["segment_ids"])
        self._loss_sum = self._loss_sum.to(mean.device) + loss.sums()
        return (mean, loss) if return_outputs else mean

    # --- 4. optimisation --------------------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.args.clip == "value":
            self.accelerator.unscale_gradients()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            nn.utils.clip_grad_value_(model.parameters(), self.args.max_grad_norm)
            return norm
        return super()._clip_grad_norm(model)

    def create_optimizer(self, model: Any = None) -> Any:
        args = self.args
        if self.optimizer is None and args.head_optimizer == "muon":
            self.optimizer = MuonWithAdamW(
                (model or self.model).named_parameters(),
                tables=self.model.tables,
                lr=args.learning_rate,
                weight_decay=args.weight_decay,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
            )
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        args = self.args
        if not args.max_minutes:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            self.lr_scheduler = wall_time_scheduler(
                name=args.lr_scheduler_type,
                optimizer=optimizer or self.optimizer,
                warmup=args.warmup_steps,
                clock=self.clock,
                options=args.lr_scheduler_kwargs,
            )
        return self.lr_scheduler

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Nothing where a run resumes after its last step: transformers would train for another epoch."""
        ended = self._patience is not None and self._patience.exhausted
        if ended or self.state.global_step >= self.state.max_steps or self.clock.progress >= 1:
            self.control.should_training_stop = True
            return
        self._metrics.start()
        self.state.compute_steps(self.args, self.state.max_steps)  # a checkpoint has those it was written with
        if self._order is not None:  # accelerate does not reach it on several processes that resume within an epoch
            self._order.set_epoch(options["epoch"])
        super()._run_epoch(*args, **options)

    # --- 5. after a step --------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        # an evaluation may end training or choose what is saved, and a resumed run logs the losses since its checkpoint
        decides = self._patience is not None or self.args.save_strategy == "best"
        due = self.control.should_save or (self.control.should_evaluate and decides)
        if due and self.args.logging_strategy != "no":
            self.control.should_log = True
        if self.control.should_log or self.control.should_save or self.control.should_evaluate:
            check_losses(self, list(self._metrics.batches))
        save = self.control.should_save
        super()._maybe_log_save_evaluate(*args, **options)
        if save and self._saved.step != self.state.global_step:  # --save_strategy best found no new best
            self.control.should_save = True
            super()._maybe_log_save_evaluate(*args, **options)
        self._metrics.start()  # the next line's time begins behind the checkpoint

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the loss per window and its parts, speed and memory since the last log, and the minutes used."""
        if "loss" in logs:
            targets = devices_of(self.target) if self.target.runs else ()
            devices = sorted({self.args.device, *targets}, key=str)
            metrics = self._metrics.since_last_log(self.flops_per_token, devices)
            logs = {**logs, **metrics, "minutes": round(self.clock.elapsed, 3)}
        if "train_loss" in logs:  # transformers' is that of the steps since the run was resumed
            del logs["train_loss"]
            total, windows = self._whole_loss_sum()
            if math.isfinite(total):  # checkpoints of older versions do not have it
                logs["train_loss"] = total / max(windows, 1)
            logs["train_runtime"] = round(60 * self.clock.elapsed, 1)  # as the loss, of the whole run
            for rate in ("train_samples_per_second", "train_steps_per_second"):  # of the part since then, by row counts
                logs.pop(rate, None)
        super().log(logs, start_time)

    @cached_property
    def flops_per_token(self) -> float:
        """6 per parameter of the head and, unless hidden states are cached, 2 per weight that the target multiplies a
        token with, its LM head left out, which soft labels alone need.

        Attention and the head's several drafts per token do not count.
        """
        lm_head = self.target.config.vocab_size * self.target.config.hidden_size
        target = 0 if self.data_collator.hidden_dtype else 2 * (weights_per_token(self.target) - lm_head)
        return 6 * sum(sharded.size_of(p) for p in self.model.parameters()) + target

    def _whole_loss_sum(self) -> list[float]:
        """Sum of the losses of all windows, those before a resume included, and their number. Call on every process."""
        summed = self._loss_sum.to(self.args.device)  # also where no step has moved it, as after a run's last one
        return (self._loss_before + self.accelerator.reduce(summed).cpu()).tolist()

    def _progress(self) -> dict[str, Any]:
        """What a resumed run reads. Call on every process."""
        clock = self.clock
        told = {"minutes": clock.now(), "losses": self._whole_loss_sum(), "warm_until": clock.warm_until}
        return told | self._simulation | {"programs": self.programs}

    # --- evaluation and the end -------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Dataset[Any] | dict[str, Dataset[Any]] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Loss, accuracy per offset and simulated β on held-out rows; every process takes its share of them."""
        start = time.monotonic()
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        head = self.whole_head()
        was_training = head.training
        head.eval()
        metrics = loss_metrics(self, head, dataset) | simulation_metrics(self, head)
        head.train(was_training)
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        named[f"{metric_key_prefix}_seconds"] = round(seconds := time.monotonic() - start, 2)
        best = (self.args.metric_for_best_model or "").removeprefix("eval_")
        if best and best not in metrics:
            why = "label counts in it: none is at its offset, or all are outside the draft vocabulary"
            remedy = "hold out more or longer rows, or choose another metric"
            if best == "simulated_beta":
                why, remedy = "answer is the target's own text", "distil with --labels generate, or leave it out"
            raise ValueError(f"--metric_for_best_model {best} could not be measured, as no held-out {why}; {remedy}")
        self._metrics.exclude(seconds)
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def whole_head(self) -> DraftHead:
        """The trained head, without what compiles it; under ZeRO-3 a copy with its weights gathered, made on every
        process."""
        head: DraftHead = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
        if not any(sharded.is_split(p) for p in head.parameters()):
            return head
        with sharded.whole(head.parameters()):
            state = {name: value.detach().clone() for name, value in head.state_dict().items()}
        copied = type(head)(head.config).to(self.args.device, head.dtype)
        copied.load_state_dict(state)
        return copied.train(head.training)

    @property
    def _best(self) -> Path | None:
        """The checkpoint whose head is exported, where that is not the last one: transformers has loaded it."""
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        return Path(best) if best else None

    @property
    def steps(self) -> int:
        """Steps of the head as it is after training."""
        return step_of(self._best) if self._best else int(self.state.global_step)

    @property
    def epochs(self) -> float:
        """How often that head had read the rows."""
        return float(self.state.epoch or 0) * self.steps / max(1, self.state.global_step)

    @property
    def minutes(self) -> float:
        """Minutes in which that head was trained."""
        return float(read_marker(self._best)["minutes"]) if self._best else self.clock.elapsed

    def final_evaluation(self) -> dict[str, float]:
        """`evaluate` after training, unless this step's head was evaluated while it trained, be it before a resume with
        the same simulation."""
        self.trained = True
        history = self.state.log_history if self.steps > self._evaluated_until else []
        known = [logs for logs in history if logs["step"] == self.steps and "eval_windows" in logs]
        return {name: x for name, x in known[-1].items() if name.startswith("eval_")} if known else self.evaluate()

    def close_progress(self) -> None:
        """Leave the progress bar as it is; otherwise it is drawn once more when the process ends."""
        for callback in self.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.close()
