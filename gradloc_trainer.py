"""GradLoc and LayerClip in a TRL or Transformers trainer: what is watched, when it is checked, what is logged."""

import contextlib

import torch
from transformers import TrainerCallback

import gradloc_report
from gradloc_batch import extras_of
from gradloc_methods import inner_module, rng_state
from layer_clip import LayerClip
from routing import replay_routing
from support import replay_support


class Attachment(TrainerCallback):
    """Connects a GradLoc (or None) and a LayerClip (its options, or None) to one trainer.

    routes() -> the experts that the last training forward of a MoE used, or None: GradLoc's own passes replay them. The
    gradient takes the routing as given, so a choice that flips under moved weights must not count.

    The model's forward hook records calls whose output has `log_probs` (TRL's fused head); `compute_loss` is wrapped to see
    the batch and the loss; `accelerator.clip_grad_norm_` is wrapped because it is the only moment between the
    backward and the clipping, and the trainer calls it also where it does not clip.
    """

    def __init__(self, trainer, gradloc=None, layer_clip=None, routes=None):
        if not hasattr(trainer, "accelerator"):
            raise ValueError(
                f"attach takes a trainer, and got {type(trainer).__name__}: use watch and check in a loop of your own"
            )
        if trainer.is_deepspeed_enabled:
            raise ValueError(
                "GradLoc and LayerClip read .grad, which DeepSpeed keeps to itself: use DDP or FSDP2, or --gradloc off"
            )
        if trainer.accelerator.scaler is not None:
            raise ValueError(
                "GradLoc and LayerClip do not follow fp16 loss scaling: train with --bf16, or --gradloc off"
            )
        self.trainer, self.gradloc, self.routes = trainer, gradloc, routes
        self.layer_clip, self._clip_options, self._clip_state = None, layer_clip, None
        self.batch = self.noise = None
        self.checked = False
        self.metrics = {}
        if gradloc is not None:
            module = inner_module(trainer.accelerator.unwrap_model(trainer.model))
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            module.register_forward_hook(self._after_forward, with_kwargs=True)
            self._compute_loss = trainer.compute_loss
            trainer.compute_loss = self._watched_loss
        self._clip = trainer.accelerator.clip_grad_norm_
        trainer.accelerator.clip_grad_norm_ = self._check_and_clip
        trainer.callback_handler.callbacks.insert(0, self)  # before the callbacks that write the log down

    def on_train_begin(self, args, state, control, **kwargs):
        """Builds LayerClip on the parameters that train, with the state of a checkpoint or of an earlier `train`.

        Raises ValueError where that state is of other groups.
        """
        self.checked = False  # a rollback leaves its step between the check and the update
        if self._clip_options is not None:  # now the parameters are those that train: FSDP2 has replaced the others
            # a second train() goes on
            before = self._clip_state if self.layer_clip is None else self.layer_clip.state_dict()
            self.layer_clip = LayerClip(self.trainer.model, **self._clip_options)
            if before is not None:
                try:
                    self.layer_clip.load_state_dict(before)
                except ValueError as error:
                    raise ValueError(f"{error} (--layer_clip_mode, --use_peft)") from error

    def state_dict(self):
        """State of both parts, None for one that is off."""
        return {
            "gradloc": None if self.gradloc is None else self.gradloc.state_dict(),
            "layer_clip": None if self.layer_clip is None else self.layer_clip.state_dict(),
        }

    def load_state_dict(self, state):
        """Before `train()`. A part that the state lacks, or that is off now, starts anew."""
        if self.gradloc is not None and state["gradloc"] is not None:
            self.gradloc.load_state_dict(state["gradloc"])
        self._clip_state, self.layer_clip = state["layer_clip"], None  # a rollback comes after an earlier train()

    def _watched_loss(self, model, inputs, *args, **kwargs):
        self.batch = inputs
        try:
            loss = self._compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.batch = None
        used = None if self.routes is None else self.routes()
        if used is not None and self.gradloc.calls:
            call = self.gradloc.calls[-1]
            call.batch = call.batch | {"routes": used}
        # sets that sampling left over: part of the model's call
        if inputs.get("support") is not None and self.gradloc.calls:
            call = self.gradloc.calls[-1]
            call.batch = call.batch | {"support": inputs["support"], "first": call.offset}
        value = loss[0] if isinstance(loss, tuple) else loss
        if torch.is_grad_enabled() and value.requires_grad:
            self.gradloc.losses.append(value.detach())
        return loss

    def _before_forward(self, module, args, kwargs):
        recording = self.batch is not None and torch.is_grad_enabled()
        self.noise = rng_state() if recording and module.training else None

    def _after_forward(self, module, args, kwargs, output):
        if self.batch is None or not torch.is_grad_enabled() or not kwargs.get("fused_lm_head"):
            return
        call = self.gradloc.record(_fused_outputs, kwargs, _named(output), self.noise)
        if call is not None:
            call.forward_mode = False  # TRL's fused head has no forward derivative
            labels = kwargs["labels"][:, 1:]
            call._mask, call.ids = labels != -100, kwargs["input_ids"][:, 1:]
            self._add_extras(call)

    def _add_extras(self, call):
        """The trainer's batch beside the model's own: completions are the last columns."""
        if isinstance(self.batch.get("completion_ids"), torch.Tensor):
            width = self.batch["completion_ids"].shape[1]
            call.offset = call.shape[1] - width
            call.extras = extras_of(self.batch, call.shape)
            tools = self.batch.get("tool_mask")
            if tools is not None:
                call._mask = call._mask.clone()
                call._mask[:, call.offset :] &= tools != 0

    def _check_and_clip(self, parameters, max_norm, *args, **kwargs):
        self._check()
        return self._clip(parameters, max_norm, *args, **kwargs)

    def _check(self):
        if self.checked:
            return
        self.checked = True
        model, step = self.trainer.model, self.trainer.state.global_step + 1
        if self.gradloc is not None:
            report = self.gradloc.check(model, step)
            if report is not None:
                for name, value in (
                    ("top1_share", report.top1_share), ("top10_share", report.top10_share),
                    ("certificate", report.certificate), ("time_ratio", report.time_ratio),
                ):  # fmt: skip
                    if value is not None:
                        self._log(f"gradloc/{name}", value)
        if self.layer_clip is not None:
            for name, value in self.layer_clip.clip_().items():
                self._log(name, value)

    def _log(self, name, value):
        if hasattr(self.trainer, "_metrics"):  # TRL: averaged into the next log line
            self.trainer._metrics["train"][name].append(value)
        else:
            self.metrics.setdefault(name, []).append(value)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Checks, where clipping has not: a step without it is looked at all the same."""
        self._check()  # a trainer that did not ask accelerate for the norm
        self.checked = False

    def on_train_end(self, args, state, control, **kwargs):
        """The run's index of spikes."""
        gradloc = self.gradloc
        if gradloc is not None and gradloc.folder is not None and gradloc.reports and state.is_world_process_zero:
            with contextlib.suppress(ValueError):  # no report could be written
                gradloc_report.write_index(gradloc.folder)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Metrics of a trainer without a metric store of its own, means since the last log."""
        for name, values in self.metrics.items():
            logs[name] = state.log_history[-1][name] = sum(values) / len(values)  # the history holds a copy
        self.metrics.clear()


def _named(output):
    return {"logps": output.log_probs, "entropy": output.entropy, "aux_loss": output.aux_loss}


def _fused_outputs(model, kwargs):
    kwargs = dict(kwargs)
    routes, support, first = (kwargs.pop(name, None) for name in ("routes", "support", "first"))
    with contextlib.ExitStack() as replays:
        if routes is not None:
            replays.enter_context(replay_routing(model, routes))
        if support is not None:
            replays.enter_context(replay_support(support, kwargs["labels"][:, 1:] != -100, first))
        return _named(model(**kwargs))
