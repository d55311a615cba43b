"""What ends a run before its last step: SIGTERM on one of several processes, the wall clock, patience."""

from types import SimpleNamespace

import torch

from draft_heads.train.stopping import Patience, StopOnSigterm, WallClock


def test_processes_ask_each_other_after_every_step_that_is_slow_on_one_of_them(monkeypatch):
    now, asked, slow_elsewhere = 0.0, [], False

    def all_reduce(tensor):
        asked.append(state.global_step)
        tensor += torch.tensor([0, slow_elsewhere])

    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    sigterm, control = StopOnSigterm(), SimpleNamespace(should_training_stop=False, should_save=False)
    args = SimpleNamespace(world_size=2, device="cpu")
    state = SimpleNamespace(global_step=0)
    sigterm.on_train_begin(args, state, control)
    for step in range(1, 31):
        state.global_step, slow_elsewhere = step, step == 19
        now += 2.0 if step in (9, 10) else 0.1
        sigterm._received = step >= 27
        sigterm.on_step_end(args, state, control)
        if sigterm.stopped:
            break
    assert asked == [1, 9, 10, 11, 19, 20, 28] and control.should_training_stop and control.should_save


def test_the_end_of_the_time_is_measured_where_the_best_checkpoint_counts():
    for best in (False, True):
        clock = WallClock(1e-9)
        control = SimpleNamespace(should_training_stop=False, should_save=False, should_evaluate=False)
        args = SimpleNamespace(world_size=1, device="cpu", load_best_model_at_end=best)
        clock.on_train_begin(args, None, control)
        clock.on_step_end(args, SimpleNamespace(global_step=1), control)
        assert control.should_training_stop and control.should_save and control.should_evaluate == best


def test_patience_goes_on_counting_in_a_resumed_run():
    args = SimpleNamespace(load_best_model_at_end=True, metric_for_best_model="eval_loss", eval_strategy="steps")
    args.greater_is_better = False
    control, state = (
        SimpleNamespace(should_training_stop=False),
        SimpleNamespace(best_metric=1.0, stateful_callbacks={}),
    )
    first = Patience(2)
    first.on_train_begin(args, state, control)
    first.on_evaluate(args, state, control, {"eval_loss": 2.0})
    assert not first.exhausted and not control.should_training_stop
    resumed, state.stateful_callbacks = Patience(2), {"Patience": first.state()}
    resumed.on_train_begin(args, state, control)
    resumed.on_evaluate(args, state, control, {"eval_loss": 2.0})
    assert resumed.exhausted and control.should_training_stop
