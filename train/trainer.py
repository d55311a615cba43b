"""DraftHeadTrainer: transformers' Trainer around a frozen target that stays outside of model and optimizer.

The target turns a batch into hidden states, the head turns those into a sum of losses over windows, and the sum is
divided by the number of windows of the whole global batch: one process or many, with or without gradient
accumulation, the loss is the same.
"""

from __future__ import annotations

import math
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import ProgressCallback, Trainer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from draft_heads.data.collate import DraftCollator, row_lengths
from draft_heads.data.common.progress import ProgressLines
from draft_heads.heads.base import DraftHead, HeadLoss
from draft_heads.inference.target import sharded
from draft_heads.inference.target.target import Target
from draft_heads.train.batches import EpochSampler, RowBatches, TokenBatches, leave_signals_to_trainer
from draft_heads.train.held_out import loss_metrics, simulation_metrics
from draft_heads.train.length import RunLength
from draft_heads.train.optimizer import MuonWithAdamW
from draft_heads.train.run_folder import kept
from draft_heads.train.since_log import SinceLog
from draft_heads.train.training_arguments import HeadTrainingArguments
from draft_heads.train.wall_clock import MinutesBar, Patience, TrainingLines, WallClock, wall_time_scheduler


class DraftHeadTrainer(Trainer):
    """Trains a `DraftHead`; metrics are per window and per label offset, and simulated β.

    simulate_dataset: rows along which simulated β is measured, with trees of `simulate_nodes`; None: not at all.
    """

    model: DraftHead
    args: HeadTrainingArguments

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
        self._since_log = SinceLog()
        self.final_metrics: dict[str, float] = {}
        self._measured: dict[int, dict[str, float]] = {}  # step → metrics of the held-out rows
        self._order: EpochSampler | None = None  # of the training rows
        self._loss_sum = torch.zeros((), dtype=torch.float64)  # of the steps in this process
        super().__init__(
            model=head,
            args=args,
            data_collator=collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=[self.clock],
        )
        if is_deepspeed_zero3_enabled():
            sharded.gather_until_step(head)
        self._patience = Patience(args.patience) if args.patience else None
        if self._patience is not None:
            self.add_callback(self._patience)
        if not args.disable_tqdm and not sys.stderr.isatty():
            self.remove_callback(ProgressCallback)
            lines = ProgressLines(partial(print, file=sys.stderr, flush=True))
            self.add_callback(TrainingLines(self.clock, lines))
        elif args.max_minutes and not args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self.add_callback(MinutesBar(self.clock))
        # `compute_loss` divides by the windows of the whole accumulated batch: transformers, 5.17 to 5.24, shall not
        # divide by the number of micro-batches once more
        self.model_accepts_loss_kwargs = True

    def start_head(self, rows: int = 8) -> None:
        """Give the head the start values that depend on the target, from a few rows of the training data.

        Raises ValueError if no row has a token to train on behind a base token.
        """
        trained = (row for row in self._rows if sum(row["assistant_mask"][: self._longest]) > 1)
        if not (first := list(islice(trained, rows))):
            raise ValueError(
                f"training needs rows with an answer of two tokens or more within --max_length {self._longest}; none "
                f"of {len(self._rows):,} has one; raise it, or distil longer answers"
            )
        batch = self.data_collator(first)
        batch = {name: value.to(self.target.device) for name, value in batch.items()}
        states = self.target.states_of(batch, self.model.config.target_layers)
        hidden, *aux_hidden = (values[batch["mask"]] for values in states.values())
        with self.target.whole_layers():
            self.model.to(self.target.device).start_from(hidden, self.view, *aux_hidden)

    def whole_head(self) -> DraftHead:
        """The trained head; under ZeRO-3 a copy with its weights gathered, made on every process."""
        head: DraftHead = self.accelerator.unwrap_model(self.model_wrapped)
        if not any(sharded.is_split(p) for p in head.parameters()):
            return head
        with sharded.whole(head.parameters()):
            state = {name: value.detach().clone() for name, value in head.state_dict().items()}
        copied = type(head)(head.config).to(self.args.device, head.dtype)
        copied.load_state_dict(state)
        return copied.train(head.training)

    def length(self) -> RunLength:
        """What ends the run: the steps that transformers' loop will count, or minutes."""
        _, per_epoch, *_, steps = self.set_initial_training_values(self.args, self.get_train_dataloader())
        return RunLength(steps, per_epoch, self.args.max_minutes)

    def plan(self) -> str:
        """What will be trained, in a line: parameters, memory of the parts, rows, tokens and steps; then warnings."""
        args, rows, longest = self.args, self._rows, self._longest
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        sizes = {"target": self.target.values_in_memory * self.target.dtype.itemsize, "head": 4 * trained}
        one = sum(p.numel() for name, p in self.model.named_parameters() if self._is_for_muon(name, p))
        sizes |= {"gradients": 4 * trained, "optimizer": 4 * (2 * trained - one)}  # Muon has one moment, AdamW two
        memory = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in sizes.items())
        tokens = sum(min(length, longest) for length in row_lengths(rows))
        data, length = f"{len(rows):,} rows of {tokens:,} tokens", self.length()
        plan = f"training {trained:,} parameters for {length} on {data}; memory before activations: {memory}"
        if args.zero_config is not None:
            plan += f"; ZeRO stage {args.zero_config['zero_optimization']['stage']}"
        return "\n".join([plan, *(f"warning: {line}" for line in length.warnings(args))])

    @property
    def _rows(self) -> Any:
        return self.train_dataset

    @property
    def _longest(self) -> int:
        collator: Any = self.data_collator
        return int(collator.max_length)

    # --- loss -------------------------------------------------------------------------------------------------------

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
        # DDP averages over processes; the host waits for nothing
        mean = loss.total * self.args.world_size / torch.as_tensor(windows).clamp(min=1)
        self._since_log.add(loss, mean.detach(), inputs["input_ids"], inputs["segment_ids"])
        self._loss_sum = self._loss_sum.to(mean.device) + mean.detach()
        return (mean, loss) if return_outputs else mean

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        """Windows of the global batch: all micro-batches of the step, all processes."""
        head = self.accelerator.unwrap_model(self.model_wrapped)
        count = torch.zeros((), dtype=torch.long, device=device)
        for batch in batch_samples:
            inputs = {name: value.to(device) for name, value in batch.items() if "hidden" not in name}
            count += head.count_windows(seed=self.state.global_step, **inputs)
        return self.accelerator.reduce(count)

    def get_train_dataloader(self) -> DataLoader:
        """Batches of `per_device_train_batch_size` rows, or of rows of similar length with `tokens_per_batch`.

        Shared out here, as accelerate would fill an epoch's last step up with rows of its first.
        """
        args, rows = self.args, self._rows
        seed = args.seed if args.data_seed is None else args.data_seed
        batches: RowBatches | TokenBatches
        if args.tokens_per_batch:
            lengths = [min(length, self._longest) for length in row_lengths(rows)]
            batches = TokenBatches(lengths, args.tokens_per_batch, seed, args.world_size)
        else:
            size, drop_last = args.per_device_train_batch_size, args.dataloader_drop_last
            batches = RowBatches(len(rows), size, seed, args.world_size, drop_last)
        self._order = batches.sampler
        loader = DataLoader(
            rows,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            in_order=args.dataloader_in_order,
            worker_init_fn=leave_signals_to_trainer,
        )
        return self.accelerator.prepare(loader)

    # --- optimisation -----------------------------------------------------------------------------------------------

    def _is_for_muon(self, name: str, parameter: Tensor) -> bool:
        """Whether Muon updates a parameter: a matrix between spaces."""
        matrix = parameter.dim() == 2 and not name.endswith(self.model.tables)
        return matrix and self.args.head_optimizer == "muon"

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None and self.args.head_optimizer == "muon":
            self.optimizer = MuonWithAdamW(
                (model or self.model).named_parameters(),
                self._is_for_muon,
                self.args.learning_rate,
                self.args.weight_decay,
                (self.args.adam_beta1, self.args.adam_beta2),
                self.args.adam_epsilon,
            )
        return super().create_optimizer(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if not self.args.max_minutes:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            args = self.args
            self.lr_scheduler = wall_time_scheduler(
                *(args.lr_scheduler_type, optimizer or self.optimizer, args.warmup_steps, self.clock),
                args.lr_scheduler_kwargs,
            )
        return self.lr_scheduler

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.args.clip == "value":
            self.accelerator.unscale_gradients()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            nn.utils.clip_grad_value_(model.parameters(), self.args.max_grad_norm)
            return norm
        return super()._clip_grad_norm(model)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the loss's parts, speed and memory since the last log, and the minutes used."""
        if "loss" in logs:
            told = self._since_log.told(self._operations_a_token, self.args.device)
            logs = {**logs, **told, "minutes": round(self.clock.elapsed, 3)}
        if "train_loss" in logs:  # transformers' is that of the steps since the run was resumed
            del logs["train_loss"]
            if math.isfinite(total := self._whole_loss_sum()):  # checkpoints of older versions do not have it
                logs["train_loss"] = total / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _whole_loss_sum(self) -> float:
        """The losses of all steps, those before a resume included, added up; called on every process."""
        return self.clock.loss_before + float(self.accelerator.reduce(self._loss_sum, "mean"))

    @property
    def _operations_a_token(self) -> float:
        """6 for each parameter of the head, and 2 for each of the target where no states are cached; attention and the
        head's several drafts a token do not count."""
        collator: Any = self.data_collator
        target = 0 if collator.hidden_dtype else 2 * self.target.parameters
        return 6 * sum(sharded.size_of(p) for p in self.model.parameters()) + target

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Nothing, where a run resumes behind its last step; transformers would train for another one."""
        ended = self._patience is not None and self._patience.exhausted
        if ended or self.state.global_step >= self.state.max_steps or self.clock.progress >= 1:
            self.control.should_training_stop = True
            return
        self._since_log.start()
        self.state.compute_steps(self.args, self.state.max_steps)  # a checkpoint has those it was written with
        if self._order is not None:  # accelerate does not reach it on several processes that resume within an epoch
            self._order.set_epoch(options["epoch"])
        super()._run_epoch(*args, **options)

    def _maybe_log_save_evaluate(self, *args: Any, **options: Any) -> None:
        if self.control.should_log or self.control.should_save or self.control.should_evaluate:
            self._check_losses()
        super()._maybe_log_save_evaluate(*args, **options)

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        """As transformers does, which would then delete checkpoints by the time stamps of their folders: `WallClock`
        deletes them by their steps, once this one is complete."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self.clock.loss_sum = self._whole_loss_sum()
        try:
            super()._save_checkpoint(*args, **options)
        finally:
            self.args.save_total_limit = limit

    def _check_losses(self) -> None:
        """ValueError on every process if a loss since the last log is no finite number; nothing bad is saved."""
        finite = torch.stack([loss for loss, _, _ in self._since_log.batches] or [torch.zeros(())]).isfinite().tolist()
        if int(self.accelerator.reduce(torch.tensor(finite.count(False), device=self.args.device))) == 0:
            return
        rows = "those of another process"
        if False in finite:
            _, input_ids, segment_ids = self._since_log.batches[finite.index(False)]
            rows = ", ".join(self._ids_of(input_ids, segment_ids))
        raise ValueError(
            f"the loss became infinite or not a number by step {self.state.global_step}; rows of the batch: {rows}; "
            f"{kept(Path(self.args.output_dir or ''))}; lower --learning_rate, or distil without those rows"
        )

    def _ids_of(self, input_ids: Tensor, segment_ids: Tensor) -> list[str]:
        """The ids of the training rows that a batch was made of."""
        batch = {
            tuple(tokens[segments == number].tolist())
            for tokens, segments in zip(input_ids, segment_ids)
            for number in range(1, int(segments.max()) + 1)
        }
        rows = self._rows.select_columns(["id", "input_ids"])
        return [row["id"] for row in rows if tuple(row["input_ids"][: self._longest]) in batch]

    def close_progress(self) -> None:
        """Leave the progress bar as it is; otherwise it is drawn once more when the process ends."""
        for callback in self.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.close()

    # --- evaluation -------------------------------------------------------------------------------------------------

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
        best = f"eval_{(self.args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        if best not in named:
            raise ValueError(
                f"--metric_for_best_model {self.args.metric_for_best_model} could not be measured: no held-out answer "
                "is the target's own text; distil with --labels generate, or leave it out"
            )
        self._since_log.leave_out(seconds)
        if eval_dataset is None and metric_key_prefix == "eval":
            self._measured[self.state.global_step] = named
        self.log(dict(named))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    @property
    def steps(self) -> int:
        """Steps of the head as it is after training: of the best checkpoint, where that was asked for."""
        return (self.args.load_best_model_at_end and self.state.best_global_step) or self.state.global_step

    def final_evaluation(self) -> dict[str, float]:
        """`evaluate` after training, unless this step's head was evaluated while it trained."""
        return self._measured.get(self.steps) or self.evaluate()
