"""The training loop, top to bottom.

Everything random is a function of the seed and of a count (epoch, step), so a resumed run is bit-identical to an
uninterrupted one on a CPU. Only torch's own generator, for networks with dropout, is stored.

On a GPU the loop synchronizes only to read the numbers of a step, one step later (`readback`).

With weight averaging, training updates the weights, and what is evaluated or saved has their mean (`averaging`).

Distributed training takes the same steps: each rank has a shard of every batch (`ranks`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from pfml.data import NeighborBatches, RetrievalData, Windows
from pfml.data.cached_features import CachedFeatures
from pfml.data.crop_transforms import transform_crops
from pfml.data.decoding import Track
from pfml.data.image_source import ImageSource
from pfml.data.pinned_memory import to_device
from pfml.data.seeding import generator_for
from pfml.distributed import World
from pfml.evaluation import EmbeddedTest, embed, evaluate, proxy_alignment
from pfml.losses.checks import DeferredCheck, deferred_checks
from pfml.methods import method_of
from pfml.models import Embedder
from pfml.models.adapters import merge_adapters
from pfml.models.freezing import set_trainable, start_training_mode
from pfml.models.head_init import FEATURE_STARTS, draw_head, initialize_head, require_layer
from pfml.runs.card import write_run_cards
from pfml.runs.checkpoint import (
    CheckpointWriter,
    by_prefix,
    has_chosen_epoch,
    load_checkpoint,
    load_chosen_epoch,
    save_chosen_epoch,
)
from pfml.runs.config import TrainConfig
from pfml.runs.folder import RunFolder, of_model, summarize
from pfml.runs.image_states import require_same_images
from pfml.runs.saved_loss import save_loss
from pfml.storage.files import write_atomically
from pfml.training.averaging import WeightAverage, largest_share
from pfml.training.cached_batch import CachedBatch
from pfml.training.environment import compiled, compiles, precision, reading_lag, reproducible, resolve_device
from pfml.training.loss_inputs import Crops, LossInputs
from pfml.training.optimizer import (
    clip_gradients,
    create_optimizer,
    gradient_norm,
    learning_rate_factor,
    set_learning_rates,
)
from pfml.training.progress import Monitor
from pfml.training.ranks import (
    agree_on_gradients,
    create_rank_loss,
    create_scaler,
    has_proxies,
    load_loss_state,
    loss_of_all,
    prepare_embedder,
    require_same_task,
    whole_loss,
)
from pfml.training.readback import Batch, Outcome, Readback
from pfml.training.setup import (
    create_batches,
    learned,
    nearest_classes,
    on_device,
    prepare_backbone,
    require_matches,
)
from pfml.training.shutdown import Interrupted, ShutdownRequest, catch_shutdown_requests
from pfml.training.start import Start, started_loss
from pfml.training.state import TrainingState, require_same_run, run_identity
from pfml.training.teachers import load_teachers, usual_dims

__all__ = ["NonFiniteLossError", "Training", "create_batches", "on_device"]

T = TypeVar("T")
#: A signal that comes again within this time is the same request, passed on by torchrun and by a terminal.
ECHO_SECONDS = 3.0


class NonFiniteLossError(RuntimeError):
    """The loss was NaN or infinite; nothing was updated with it."""


class Training:
    """A run in progress: its state, and the steps that change it.

    Args:
        embedder: The model, trained in place.
        data: What to train and evaluate on.
        sources: An image source for "train", "test", and "validation" and "gallery" if the data has them.
        config: How to train.
        folder: Where the run keeps its files.
        monitor: What to show.
        world: The ranks that train together; None for one process by itself.
        start: Of a run that continues another one: what the loss takes over. `embedder` is the one of `start`.
        loss: One's own in place of what `config.loss` would make, trained in place.
    """

    def __init__(
        self,
        embedder: Embedder,
        data: RetrievalData,
        sources: dict[str, ImageSource],
        config: TrainConfig,
        folder: RunFolder,
        monitor: Monitor,
        world: World | None = None,
        start: Start | None = None,
        loss: nn.Module | None = None,
    ) -> None:
        self.world, self.start, self.is_restored = world or World(), start, False
        self.device = self.world.device or resolve_device(config.device)
        require_same_task(config, data, self.world)
        prepare_backbone(embedder, config)
        self.embedder = prepare_embedder(on_device(embedder, self.device), config, self.world)
        self.embedder.trained_on = learned(embedder, data)
        require_matches(data)
        self.batches = create_batches(data.train, config)
        created = create_rank_loss(config.loss, data.train.num_classes, self.embedder, self.world, loss)
        self.loss: Any = created.to(self.device)
        self.inputs = LossInputs(self.embedder, self.loss)
        compiling = config.freeze == "none" and compiles(config, self.device, config.epochs * len(self.batches))
        self.compiled = compiled(self.inputs.network, self.device) if compiling else self.inputs.network
        self.network = self.compiled
        lag = reading_lag(config, self.device)
        self.readback = Readback(self.device, lag=lag)
        self.optimizer = create_optimizer(
            config.optimizer,
            self.embedder,
            self.loss,
            hold=self.readback.hold if lag else None,
            fused=True,
        )
        self.scaler = create_scaler(config, self.device, self.world)
        averaged_steps = (config.epochs - config.settled_from) * len(self.batches)
        self.weight_average = WeightAverage(self.embedder, min(config.average, largest_share(averaged_steps)))
        self.labels = data.train.labels.to(self.device)
        self.teachers = load_teachers(config, data, self.embedder, self.device, config.epochs * len(self.batches))
        self.writer = CheckpointWriter(folder.checkpoints, in_background=self.device.type == "cuda")
        self.data, self.sources, self.config, self.folder, self.monitor = data, sources, config, folder, monitor
        averages = self.weight_average, self.inputs.follower
        self.state = TrainingState(self.embedder, self.loss, self.optimizer, self.scaler, *averages)
        self.mean_terms: dict[str, float] = {}  # of the last whole epoch
        self.throughput = Throughput()
        self.shutdown = ShutdownRequest()

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the run is; see `run_identity`."""
        return run_identity(self.config, self.data, self.embedder)

    @property
    def step(self) -> int:
        """Finished updates."""
        return self.state.epoch * len(self.batches) + self.state.position

    def run(self) -> dict[str, Any]:
        """Train to the end; the results, also written to the run's folder."""
        echo = ECHO_SECONDS if self.world.size > 1 else 0.0
        with catch_shutdown_requests(echo_seconds=echo) as self.shutdown, reproducible(self.config.deterministic):
            if self.config.freeze == "trunk":
                self.cache_features()
            if self.step == 0 and not self.is_restored:
                self.initialize_head()
                self.initialize_proxies()
            if self.teachers is not None and self.state.epoch < self.config.epochs:
                self.reduce_teachers()
            self.monitor.start(self.config.epochs, len(self.batches), self.step)
            try:
                with self.writer:
                    if self.start is not None and not self.is_restored:
                        self.save()  # from now on, the run that this one continues is not needed
                    while self.state.epoch < self.config.epochs:
                        self.train_epoch()
            finally:
                self.monitor.stop()
            return self.finish()

    def train_epoch(self) -> None:
        """The rest of the current epoch, an evaluation if one is due, a checkpoint."""
        config = self.config
        self.start_epoch()
        start_training_mode(self.embedder, batch_norm=config.batch_norm)
        set_trainable(
            self.embedder,
            warming_up=config.is_warm_up(self.state.epoch),
            batch_norm=config.batch_norm,
            warm_up_epochs=config.warm_up_epochs,
        )
        # compiled for what trains most of the time: torch 2.9 to 2.11 would keep a backward pass without the backbone
        self.network = self.inputs.network if config.is_warm_up(self.state.epoch) else self.compiled
        self.loss.train()
        self.throughput = Throughput()
        remaining = self.batches.batches(self.state.epoch)[self.state.position :]
        crops = self.world.in_step(self.sources["train"].crops(self.plan(remaining)))
        for indices, pixels in zip(remaining, crops, strict=True):
            outcomes = self.update(indices, self.transformed(indices, pixels))
            self.state.position += 1
            self.account(outcomes)
            due = config.checkpoint_every and self.step % config.checkpoint_every == 0
            stop = self.world.all_reduce_max(self.shutdown.number)  # once: the signal may come between two reads
            if due or stop:
                self.save()
            if stop:
                raise self.interrupted(stop)
        self.catch_up()
        self.mean_terms = {name: value / len(self.batches) for name, value in self.state.term_sums.items()}
        done = self.state.epoch + 1
        if done % config.evaluate_every == 0 or done == config.epochs:
            try:
                with self.weight_average.applied():
                    self.evaluate(done, self.state.loss_sum / len(self.batches))
            except Interrupted:
                self.save()  # before the evaluation, which a resumed run starts with
                raise
        self.state.end_epoch()
        self.save()
        self.stop_if_requested()

    def start_epoch(self) -> None:
        """Give embeddings of all training images to a loss that wants them, and nearest classes to the sampler."""
        start_epoch = getattr(loss_of_all(self.loss), "start_epoch", None)
        if start_epoch is not None and self.state.position == 0:
            start_epoch(self.embeddings("train").to(self.device), self.labels)
        if isinstance(self.batches, NeighborBatches):
            self.batches.nearest = nearest_classes(loss_of_all(self.loss), self.batches.classes_per_batch - 1)

    def interrupted(self, number: int) -> Interrupted:
        """The exception that ends a run after a shutdown request, once its state is saved."""
        return Interrupted(f"stopped at step {self.step}, state saved", number)

    def stop_if_requested(self) -> None:
        """End the run if any rank has received a shutdown request; all ranks call this after the state is saved."""
        if stop := self.world.all_reduce_max(self.shutdown.number):
            raise self.interrupted(stop)

    @property
    def track(self) -> Track | None:
        """How long passes over images are shown and stopped; None on several ranks, which must stop together."""
        return self.stoppable if self.world.size == 1 else None

    def stoppable(self, items: Iterable[T], description: str, total: int) -> Iterator[T]:
        """The items, until a shutdown is requested: a `Track` of one process."""
        for item in items:
            yield item
            if self.shutdown.received:
                raise self.interrupted(self.shutdown.number)

    def plan(self, batches: list[Tensor]) -> Iterator[Windows]:
        """Where the images of each batch are cropped, of this rank's shard: first crops, then second ones if any."""
        sizes, count = self.sources["train"].sizes, self.inputs.crops_per_image
        for step, indices in enumerate(batches, start=self.step):
            generator = generator_for(self.config.seed, "crops", step)
            repeated = indices.repeat(count)
            windows = self.config.augmentation.windows(repeated, sizes, self.embedder.preprocessing, generator)
            mine = torch.arange(len(repeated)).view(count, -1)[:, self.world.shard(len(indices))]
            yield windows.rows(mine.flatten())

    def transformed(self, indices: Tensor, crops: Tensor) -> Tensor:
        """The crops of this rank's shard of a batch after the transforms of finished crops, if there are any."""
        first = self.world.shard(len(indices)).start or 0
        pieces = crops.chunk(self.inputs.crops_per_image)
        for number, piece in enumerate(pieces):  # in place
            start = first + number * len(indices)
            transform_crops(piece, self.config.augmentation, self.config.seed, self.step, start)
        return crops

    def update(self, indices: Tensor, pixels: Tensor) -> list[Outcome]:
        """One step of the optimizer; the outcomes of all steps that have been read back."""
        config = self.config
        batch = Batch(self.step, self.state.epoch, self.state.position, indices)
        factor = learning_rate_factor(config.schedule, self.step, len(self.batches), config.epochs)
        set_learning_rates(self.optimizer, factor)
        self.optimizer.zero_grad(set_to_none=True)
        crops = self.crops(batch, pixels)
        targets = self.targets(batch, crops.own)  # teachers embed the crops beside the forward pass
        autocast = torch.autocast(self.device.type, precision(config.autocast), enabled=config.autocast != "none")
        with self.world.own_draws(config.seed, batch.step), autocast:
            pieces = CachedBatch(self.network, crops.passed, config.batch.mini_batch_size)
            embeddings, inputs = self.inputs.of(pieces.outputs, crops)
        checking: AbstractContextManager[list[DeferredCheck]] = (
            deferred_checks() if self.readback.lag else nullcontext([])
        )
        with checking as checks:
            loss = self.energy(embeddings, targets(), batch, **inputs)
        self.scaler.scale(loss).backward()
        with autocast:
            pieces.backward()
        agree_on_gradients(self.embedder, self.loss, self.world)
        self.scaler.unscale_(self.optimizer)
        norm = gradient_norm(self.optimizer, self.world)
        outcomes = self.readback.add(batch, loss, norm, checks, getattr(self.loss, "terms", None))
        self.judge(outcomes)
        clip_gradients(self.optimizer, config.optimizer, norm, self.world)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if batch.epoch >= config.settled_from:
            self.weight_average.update()
        self.inputs.follower.update()
        return outcomes

    def crops(self, batch: Batch, pixels: Tensor) -> Crops:
        """The crops of this rank's shard of a batch, as the loss asks for them."""
        generator = generator_for(self.config.seed, "mixing", batch.step)
        return self.inputs.crops(pixels, self.data.train.labels[batch.indices], generator, self.world)

    def targets(self, batch: Batch, pixels: Tensor) -> Callable[[], Tensor]:
        """A function that returns the targets of this rank's shard: labels, or embeddings of its crops by teachers."""
        if self.teachers is not None:
            return self.teachers.begin(pixels)
        mine = batch.indices[self.world.shard(len(batch.indices))]
        labels = to_device(self.data.train.labels[mine], self.device)
        return lambda: labels

    def energy(self, embeddings: Tensor, targets: Tensor, batch: Batch, **inputs: Tensor) -> Tensor:
        """The loss of the whole batch; embeddings that are not finite end the run and name the batch."""
        try:
            loss = self.loss(embeddings, targets, **inputs)
        except ValueError as error:
            self.blame(error, embeddings, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"the loss {self.config.loss.name} must return a scalar tensor, got {got}")
        return loss

    def judge(self, outcomes: Iterable[Outcome]) -> None:
        """Stop the run at a step that was not finite; neither it nor a later step has been applied."""
        for outcome in outcomes:
            for check in outcome.checks:
                try:
                    check.explain()
                except ValueError as error:
                    self.blame(error, check.embeddings, outcome.batch)
            if not math.isfinite(outcome.loss):
                self.fail(outcome.batch, f"the loss is {outcome.loss}")
            if outcome.held and not self.scaler.is_enabled():  # a scaler skips such a step by itself
                self.fail(outcome.batch, f"the norm of the gradient is {outcome.norm}")

    def account(self, outcomes: Iterable[Outcome]) -> None:
        """Add finished steps to the epoch's mean, the log and the monitor."""
        for outcome in outcomes:
            batch, done = outcome.batch, outcome.batch.step + 1
            self.state.loss_sum += outcome.loss
            for name, value in outcome.terms.items():
                self.state.term_sums[name] = self.state.term_sums.get(name, 0.0) + value
            terms = {"terms": outcome.terms} if outcome.terms else {}
            self.throughput.images += len(batch.indices)
            speed = self.throughput.images_per_second()
            self.monitor.step(batch.epoch, outcome.loss, speed)
            if done % self.config.log_every == 0:
                self.folder.append("step", done, epoch=batch.epoch, loss=outcome.loss, images_per_second=speed, **terms)

    def catch_up(self) -> None:
        """Wait for the steps that are still pending on the device, and account for them."""
        outcomes = self.readback.flush()
        self.judge(outcomes)
        self.account(outcomes)

    def blame(self, error: ValueError, embeddings: Tensor, batch: Batch) -> NoReturn:
        """Name the batch if its embeddings are not finite; other errors of a loss are not about the batch."""
        if not self.world.all_reduce_max(not torch.isfinite(embeddings).all()):
            raise error
        self.fail(batch, str(error))

    def fail(self, batch: Batch, reason: str) -> NoReturn:
        """Stop the run before the update, and list the images of the batch in failed_batch.json."""
        names = [self.data.train.name_of(int(k)) for k in batch.indices]
        record = {"step": batch.step, "epoch": batch.epoch, "reason": reason, "images": names}
        if self.world.is_first:
            write_atomically(self.folder.failed_batch, json.dumps(record, indent=1).encode())
        raise NonFiniteLossError(
            f"{reason} at step {batch.step} (epoch {batch.epoch + 1}, batch {batch.position + 1}), "
            f"nothing was updated; its {len(names)} images, {names[0]} first, "
            f"are listed in {self.folder.failed_batch}. A lower learning rate or gradient clipping may help"
        )

    def cache_features(self) -> None:
        """Put the features of a frozen backbone in the place of all images."""
        known: dict[int, CachedFeatures] = {}
        for role, source in self.sources.items():
            if id(source) not in known:
                known[id(source)] = CachedFeatures(self.embeddings(role, features=True), source.sizes)
                self.monitor.remark(f"{role}: {known[id(source)].description}")
        self.sources = {role: known[id(source)] for role, source in self.sources.items()}

    def reduce_teachers(self) -> None:
        """Reduce the teachers to `config.teacher_dims` principal dimensions of the training images."""
        assert self.teachers is not None
        dims = self.config.teacher_dims
        if dims == "auto":
            teachers = [each.embedding_dim for each in self.teachers.networks]
            dims = usual_dims(teachers, self.embedder.embedding_dim)
        if dims is None:
            return
        source = self.sources["train"]
        batches = torch.arange(len(source.sizes)).split(self.config.batch.size)
        full = batches if len(batches) == 1 else [each for each in batches if len(each) == len(batches[0])]
        crops = source.crops([self.embedder.preprocessing.windows(indices, source.sizes) for indices in full])
        seen = crops if self.track is None else self.track(crops, "embedding by teachers", len(full))
        kept = self.teachers.reduce(dims, (to_device(each, self.device) for each in seen))
        assert self.teachers.basis is not None
        self.world.broadcast([self.teachers.basis])  # rounding may flip the sign of a direction on another rank
        self.monitor.remark(f"teachers: {dims} dimensions, which hold {kept:.0%} of their variance")

    def initialize_head(self) -> None:
        """Initialize the embedding layer as `config.head_start` says, from features of the training set if needed."""
        start, head = self.config.head_start, self.embedder.head
        if start == "random" or self.start is not None:
            return
        if start not in FEATURE_STARTS:
            draw_head(head, start, generator=generator_for(self.config.seed, "head", 0))
            return
        require_layer(head, start)
        features = self.embeddings("train", features=True)
        initialize_head(head, start, features, self.labels)
        self.world.broadcast(list(head.state_dict().values()))

    def initialize_proxies(self) -> None:
        """Initialize the proxies from embeddings of the training set, if the loss does so, or from another run."""
        if self.start is not None:
            self.monitor.remark(self.start.remark)
            if self.start.proxies:
                points, names, seed = self.embeddings("train"), self.data.train.class_names, self.config.seed
                whole = started_loss(self.config.loss, self.start, names, points, self.data.train.labels, seed=seed)
                load_loss_state(self.loss, whole.state_dict())
                return
        loss: Any = loss_of_all(self.loss)
        if getattr(loss, "proxies_ready", True):
            return
        embeddings = self.embeddings("train")
        generator = generator_for(self.config.seed, "proxies", 0)
        loss.initialize_proxies(embeddings.to(self.device), self.labels, generator=generator)

    def evaluate(self, epoch: int, mean_loss: float) -> None:
        """Add an evaluation of what is held out, after so many epochs, to the history."""
        entry: dict[str, Any] = {
            "epoch": epoch,
            "loss": mean_loss,
            **({"terms": self.mean_terms} if self.mean_terms else {}),
            "images_per_second": self.images_per_second(),
        }
        entry |= {role: self.scores(role) for role in ("test", "validation") if role in self.sources}
        before = self.chosen_epoch()
        self.state.history.append(entry)
        if self.world.all_reduce_max(self.chosen_epoch() == epoch):
            self.save_chosen(epoch, [] if before is None else [before])
        self.folder.append("evaluation", self.step, **entry)
        self.monitor.evaluated(entry)

    def images_per_second(self) -> float:
        """Throughput of this epoch; from the log if the epoch was trained before the run was resumed."""
        steps = [] if self.throughput.images else self.folder.entries("step")
        return float(steps[-1]["images_per_second"]) if steps else self.throughput.images_per_second()

    def chosen_epoch(self) -> int | None:
        """The epoch that validation has chosen so far; None without validation."""
        if not self.state.history:
            return None
        chosen = summarize(self.state.history, select_by=self.config.select_by)["validation_selected"]
        return None if chosen is None else int(chosen["epoch"])

    def save_chosen(self, epoch: int, also: Sequence[int]) -> None:
        """Save the embedder as it was evaluated and the loss: validation chose this epoch. All ranks call this."""
        tensors = self.state.model_tensors()
        self.world.by_first(self.folder.require_there)
        self.writer.wait()  # then no checkpoint refers to the epochs that are removed
        self.world.by_first(lambda: save_chosen_epoch(self.folder.checkpoints, epoch, tensors, also=also))

    def scores(self, role: str) -> dict[str, float]:
        """Retrieval on the test or validation classes."""
        data = self.data if role == "test" else self.data.validation
        assert data is not None
        with self.at_test_size():
            metrics = evaluate(
                self.embedder,
                data,
                recall_at=self.data.recall_at,
                test_source=self.sources[role],
                gallery_source=self.sources.get("gallery") if role == "test" else None,
                autocast=precision(self.config.autocast),
                track=self.track,
                world=self.world,
            )
        return metrics.as_dict()

    @contextmanager
    def at_test_size(self) -> Iterator[None]:
        """Within the block the embedder has the image size of the trained model, `config.test_image_size`."""
        before = self.embedder.config, self.embedder.preprocessing
        if self.config.test_image_size is not None:
            self.embedder.set_image_size(self.config.test_image_size)
        try:
            yield
        finally:
            self.embedder.config, self.embedder.preprocessing = before

    def embeddings(self, role: str, *, features: bool = False) -> Tensor:
        """Embeddings (or features) of all images of a role, from crops in the middle."""
        return embed(
            self.embedder,
            self.sources[role],
            autocast=precision(self.config.autocast),
            track=self.track,
            world=self.world,
            features=features,
        )

    def finish(self) -> dict[str, Any]:
        """Save embedder and loss, measure how well proxies fit their data, write the results.

        The caller's embedder keeps the weights of the model: of the epoch that validation chose, else of the last;
        averaged, if weights are averaged.
        """
        self.weight_average.adopt()
        self.embedder.eval()
        loss = whole_loss(self.loss, self.config.loss, self.data.train.num_classes, self.embedder.embedding_dim)
        results = summarize(self.state.history, select_by=self.config.select_by, protocol=self.data.protocol)
        with self.at_test_size():  # an embedder whose run was interrupted here is the one that resumes it
            self.become_model(loss, results)
            is_known = self.data.protocol == "images"
            points = self.embeddings("train") if has_proxies(self.loss) or is_known else None
            held_out = self.embedded_test(points) if points is not None and is_known else None
            self.stop_if_requested()
            results = self.world.by_first(lambda: self.written(loss, points, results, held_out))
        if self.config.test_image_size is not None:
            self.embedder.set_image_size(self.config.test_image_size)
        merge_adapters(self.embedder)
        # a caller that starts another run would not notice it
        if stop := self.world.all_reduce_max(self.shutdown.number):
            raise Interrupted("stopped when the run had ended, its results are written", stop)
        return results

    def become_model(self, loss: Any, results: dict[str, Any]) -> None:
        """Give the embedder, and `loss` on the first rank, the state of the epoch that is the run's model.

        If validation chose another epoch than the last, the last one is saved beside it. If the state of the chosen
        epoch was removed, `results` say that the last is the model.
        """
        learned, last = self.embedder.trained_on, results["last"]["epoch"]
        assert learned is not None
        chosen, checkpoints = of_model(results)["epoch"], self.folder.checkpoints
        if chosen != last and not self.world.by_first(lambda: has_chosen_epoch(checkpoints, chosen)):
            self.monitor.remark(
                f"{checkpoints} does not hold the state of epoch {chosen}, which validation chose: "
                f"the model is that of the last epoch, {last}"
            )
            results["model"], chosen = "last", last
        if chosen != last:
            of_last = replace(learned, epoch=last)
            self.world.by_first(lambda: self.embedder.save(self.folder.last_model, trained_on=of_last))
            self.world.by_first(lambda: self.load_chosen(loss, chosen))
            self.world.broadcast(list(self.embedder.state_dict().values()))
        by = None if results["model"] == "last" else results["selected_by"]
        self.embedder.trained_on = replace(learned, epoch=chosen, chosen_by=by)

    def load_chosen(self, loss: Any, epoch: int) -> None:
        """Give the embedder and `loss` the state of a chosen epoch."""
        tensors = load_chosen_epoch(self.folder.checkpoints, epoch)
        self.embedder.load_state_dict(by_prefix(tensors, "embedder/"))
        loss.load_state_dict(by_prefix(tensors, "loss/"))

    def embedded_test(self, train: Tensor) -> EmbeddedTest:
        """Embeddings of the test images and of their gallery; `train` are those of the training images."""
        gallery = self.data.gallery
        assert gallery is not None
        items = train if gallery is self.data.train else self.embeddings("gallery")
        return EmbeddedTest(self.embeddings("test"), self.data.test.labels, items, gallery.labels)

    def written(
        self, loss: Any, train: Tensor | None, results: dict[str, Any], held_out: EmbeddedTest | None
    ) -> dict[str, Any]:
        """The results, after writing all that a run ends with.

        Args:
            loss: As training left it.
            train: Embeddings of the training images; None for a loss without proxies.
            results: The evaluations to report.
            held_out: Embeddings of held-out images of known classes, whose accuracy is measured; None for others.
        """
        self.folder.require_there()
        self.embedder.save(self.folder.model)
        names, dim = self.data.train.class_names, self.embedder.embedding_dim
        num_features = self.embedder.head.num_features if method_of(self.config.loss.name).has_heads else None
        save_loss(self.folder.loss, loss, self.config.loss, names, dim, num_features)
        proxies = loss.proxy_points() if has_proxies(self.loss) else None
        if held_out is not None:
            known = held_out.classification(None if proxies is None else proxies.detach()).as_dict()
            results["last"] = {**results["last"], "known": known}
            if not self.folder.entries("known"):
                self.folder.append("known", self.step, **known)
        if train is not None and proxies is not None:
            alignment = proxy_alignment(proxies, train, self.data.train.labels)
            results["alignment"] = {"paper": alignment.paper, "wasserstein2": alignment.wasserstein2}
        self.folder.write_results(results)
        write_run_cards(self.folder, self.data, self.config, results)
        self.folder.close()
        self.folder.require_there()
        return results

    def save(self) -> None:
        """Write a checkpoint, after all pending steps."""
        self.catch_up()
        tensors = self.state.tensors()
        values = {"step": self.step, **self.state.values(), **self.identity}
        self.world.by_first(self.folder.require_there)
        self.world.by_first(lambda: self.writer.save(tensors, values))

    def restore(self) -> None:
        """Resume from the folder's checkpoint."""
        tensors, values = load_checkpoint(self.folder.checkpoints)
        require_same_run(values, self.identity, self.folder.path)
        self.world.by_first(lambda: require_same_images(self.folder, self.data))
        self.state.restore(tensors, values)
        self.is_restored = True
        self.folder.forget_after(self.step, len(self.state.history))


class Throughput:
    """Images per second since it was created."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.images = 0

    def images_per_second(self) -> float:
        """The mean so far."""
        return self.images / max(time.perf_counter() - self.started, 1e-9)
