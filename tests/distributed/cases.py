"""What tests run inside the processes of a `World`: functions of a process group that return plain numbers."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from pfml.distributed import ShardedPotentialFieldLoss
from pfml.losses import PotentialFieldLoss
from states import State

#: How the global batch is dealt to the ranks, by name: shares of it, for at most four ranks.
DEALS = {"even": (1, 1, 1, 1), "uneven": (5, 1, 2, 4), "empty": (3, 0, 2, 1), "one for all": (0, 1, 0, 0)}


def batch_sizes(total: int, world: int, deal: str) -> list[int]:
    shares = DEALS[deal][:world] if sum(DEALS[deal][:world]) else (1,) * world
    sizes = [total * share // sum(shares) for share in shares]
    sizes[shares.index(max(shares))] += total - sum(sizes)
    return sizes


def state_of(spread: float, classes: int = 7, per_class: int = 3, samples: int = 29, dim: int = 12) -> State:
    return State(num_samples=samples, num_classes=classes, per_class=per_class, dim=dim, spread=spread, seed=3)


def whole_loss(state: State, options: dict, dtype: torch.dtype) -> PotentialFieldLoss:
    """A single process's loss whose proxies are the state's, off the sphere if they may be."""
    loss = PotentialFieldLoss(
        state.num_classes, state.samples.shape[1], proxies_per_class=state.per_class, **options
    ).to(dtype)
    lengths = torch.linspace(0.5, 2.0, len(state.proxies), dtype=torch.float64)[:, None]
    if options.get("proxy_space") == "free":
        lengths = 0.9 + 0.1 * lengths
    loss.proxies.data.copy_((state.proxies.double() * lengths).view_as(loss.proxies))
    return loss


def shard_of(whole: PotentialFieldLoss, group, options: dict, **more) -> ShardedPotentialFieldLoss:
    """The part of `whole` that belongs to this rank."""
    sharded = ShardedPotentialFieldLoss(
        whole.num_classes,
        whole.embedding_dim,
        proxies_per_class=whole.proxies_per_class,
        group=group,
        **options,
        **more,
    ).to(whole.proxies.dtype)
    sharded.proxies.data.copy_(whole.proxies.detach().flatten(0, 1)[sharded.rows])
    return sharded


def error(got: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    if got.shape != expected.shape:
        raise AssertionError(f"{got.shape} is not {expected.shape}")
    return (got - expected).norm().item() / max(scale, 1e-12) if got.numel() else 0.0


def errors_in_both_types(group, options, spread, deal, sizes=()):
    return [errors_of_a_step(group, options, spread, deal, dtype, sizes) for dtype in (torch.float32, torch.float64)]


def errors_of_a_step(group, options, spread, deal, dtype, sizes=()):
    """Relative errors of value, embeddings' and proxies' gradient against one process; and what the step reported."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    state = state_of(spread, *sizes)
    sizes = batch_sizes(len(state.samples), world, deal)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    whole = whole_loss(state, options, dtype)
    samples = (1.3 * state.samples).to(dtype).requires_grad_()
    expected = whole(samples, state.sample_labels)
    (3 * expected).backward()

    sharded = shard_of(whole_loss(state, options, dtype), group, options, model_gradients="summed")
    part = (1.3 * state.samples).to(dtype)[mine].requires_grad_()
    value = sharded(part, state.sample_labels[mine])
    (3 * value).backward()
    scale = max(samples.grad.norm().item(), whole.proxies.grad.norm().item())
    assert value.dtype == expected.dtype
    return (
        abs(value - expected).item() / max(abs(expected.item()), 1e-3),
        error(part.grad, samples.grad[mine], scale),
        error(sharded.proxies.grad, whole.proxies.grad.flatten(0, 1)[sharded.rows], scale),
        value.item(),
        tuple(sharded.last_step),
    )


def trusted_samples(group, options, spread, deal, sizes=()):
    """What `trusted` tells this rank, and the gradient of its embeddings in training and in evaluation mode."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    state = state_of(spread, *sizes)
    sizes = batch_sizes(len(state.samples), world, deal)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    loss = shard_of(whole_loss(state, options, torch.float32), group, options)
    gradients = []
    for training in (True, False):
        part = state.samples[mine].clone().requires_grad_()
        loss.train(training)(part, state.sample_labels[mine]).backward()
        gradients.append(part.grad)
    return loss.trusted(state.samples[mine], state.sample_labels[mine]), *gradients


def errors_of_mixed_modes(group, options):
    """What a loss raises that rank 1 has in evaluation mode and the others in training mode, and a value after it."""
    state = state_of(0.4)
    loss = shard_of(whole_loss(state, options, torch.float32), group, options).train(dist.get_rank(group) != 1)
    message = message_of(loss, state.samples, state.sample_labels)
    return message, loss.train()(state.samples, state.sample_labels).item()


def two_steps_and_half_precision(group):
    """Values and gradients of two equal steps, bit by bit, and the types of the gradients of float16 embeddings."""
    rank = dist.get_rank(group)
    state = state_of(0.4)
    loss = shard_of(whole_loss(state, {}, torch.float32), group, {})
    mine = slice(rank * 5, rank * 5 + 4)
    results = []
    for dtype in (torch.float32, torch.float32, torch.float16):
        part = state.samples[mine].to(dtype).requires_grad_()
        value = loss(part, state.sample_labels[mine])
        loss.proxies.grad = None
        value.backward()
        results.append((value.item(), part.grad.dtype, part.grad.tolist(), loss.proxies.grad.tolist()))
    return results


def step_costs(group, options, steps):
    """`step_cost_of` several steps."""
    return [step_cost_of(group, options, *step) for step in steps]


def step_cost_of(group, options, deal, dtype, with_gradient):
    """What a step reported, and what the model says."""
    from pfml.distributed import ShardedProblem, step_cost

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    state = state_of(0.4)
    sizes = batch_sizes(len(state.samples), world, deal)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    whole = whole_loss(state, options, dtype)
    kept = whole.trusted(state.samples.to(dtype), state.sample_labels)
    loss = shard_of(whole, group, options)
    posted = {dist.isend: 0, dist.irecv: 0}
    post = dist.batch_isend_irecv

    def counted(operations):
        for operation in operations:
            posted[operation.op] += operation.tensor.numel() * operation.tensor.element_size()
        return post(operations)

    with torch.set_grad_enabled(with_gradient), mock.patch.object(dist, "batch_isend_irecv", counted):
        loss(state.samples[mine].to(dtype), state.sample_labels[mine])
    assert (posted[dist.isend], posted[dist.irecv]) == tuple(loss.last_step[1:3]), "every byte is counted"
    problem = ShardedProblem(
        batch_sizes=sizes,
        num_classes=loss.num_classes,
        proxies_per_class=loss.proxies_per_class,
        embedding_dim=loss.embedding_dim,
        field=loss.field,
        weights=loss.weights,
        number_bytes=loss.proxies.element_size(),
        with_gradient=with_gradient,
        samples_on_sphere=loss.normalize_embeddings,
        proxies_on_sphere=loss.proxy_space != "free",
        trusted_sizes=[int(part.sum()) for part in kept.split(sizes)] if loss.trust else None,
    )
    return tuple(loss.last_step), tuple(step_cost(problem, rank))


def placed_proxies(group, options, embeddings, labels):
    """The proxies of each rank after construction and after `initialize_proxies`, from one seed."""
    torch.manual_seed(5)
    loss = ShardedPotentialFieldLoss(6, 5, proxies_per_class=3, group=group, **options)
    before = loss.proxies.tolist()
    refused = None
    try:
        loss(embeddings[:2], labels[:2])
    except RuntimeError as caught:
        refused = str(caught)
    loss.initialize_proxies(embeddings, labels, generator=torch.Generator().manual_seed(1))
    loss(embeddings[:2], labels[:2])
    return before, loss.proxies.tolist(), refused


def projected_rows(group):
    """The lengths of the parameter's rows after a forward pass in training mode and in evaluation mode."""
    state = state_of(0.4)
    lengths = []
    for training in (False, True):
        options = {"proxy_space": "projected"}
        loss = shard_of(whole_loss(state, options, torch.float32), group, options).train(training)
        loss(state.samples, state.sample_labels)
        lengths.append(loss.proxies.detach().norm(dim=1).tolist())
    return lengths


def network(seed: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 6))


def batches(steps: int, total: int = 13):
    g = torch.Generator().manual_seed(8)
    return [(torch.randn(total, 9, generator=g), torch.randint(0, 5, (total,), generator=g)) for _ in range(steps)]


def trained(module, loss, optimizer_name, steps):
    """Run steps of an optimizer over a module and a loss's own groups."""
    optimizer = getattr(torch.optim, optimizer_name)(
        [{"params": module.parameters(), "lr": 1e-3}, *loss.param_groups(lr=1e-2)]
    )
    values = []
    for images, labels in steps:
        optimizer.zero_grad()
        value = loss(module(images), labels)
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


def under_ddp(group, options, optimizer_name, deal, model_gradients):
    """Values, network parameters and proxies after three steps under DistributedDataParallel."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    module = torch.nn.parallel.DistributedDataParallel(network(), process_group=group)
    torch.manual_seed(6)
    loss = ShardedPotentialFieldLoss(
        5, 6, proxies_per_class=2, reduction="points", group=group, model_gradients=model_gradients, **options
    )
    sizes = batch_sizes(13, world, deal)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    values = trained(module, loss, optimizer_name, [(images[mine], labels[mine]) for images, labels in batches(3)])
    return values, [p.tolist() for p in module.module.parameters()], loss.proxies.tolist()


def in_one_process(options, optimizer_name):
    module = network()
    torch.manual_seed(6)
    loss = PotentialFieldLoss(5, 6, proxies_per_class=2, reduction="points", **options)
    values = trained(module, loss, optimizer_name, batches(3))
    return values, [p.detach() for p in module.parameters()], loss.proxies.detach().flatten(0, 1)


def message_of(function, *arguments, **options):
    """Type and text of the error that a call raises, or None."""
    try:
        function(*arguments, **options)
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return None


def errors_of_construction(group, by_rank):
    """What construction raises where each rank has options of its own, and that the ranks still talk to each other."""
    options = {"num_classes": 4, "embedding_dim": 3, "proxies_per_class": 2, **by_rank[dist.get_rank(group)]}
    message = message_of(ShardedPotentialFieldLoss, group=group, **options)
    fine = ShardedPotentialFieldLoss(4, 3, proxies_per_class=2, group=group)
    return message, fine(torch.eye(3), torch.arange(3)).item()


def errors_of_forward(group, fault, culprits):
    """What forward raises on each rank if some of them bring a faulty batch, and the value of a good one after it."""
    rank = dist.get_rank(group)
    torch.manual_seed(0)
    loss = ShardedPotentialFieldLoss(4, 3, proxies_per_class=2, group=group)
    embeddings, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)), torch.arange(5) % 4
    good = embeddings.clone(), labels.clone()
    backup = loss.proxies.detach().clone()
    if rank in culprits:
        if fault == "label":
            labels[3] = 7
        elif fault == "nan":
            embeddings[2, 1] = torch.nan
        elif fault == "shape":
            embeddings = embeddings[:, :2]
        elif fault == "float labels":
            labels = labels.float()
        elif fault == "proxies":
            loss.proxies.data[1, 1] = torch.inf
        elif fault == "type":
            embeddings = embeddings.double()
        elif fault == "other loss":
            loss.digest += 1
    message = message_of(loss, embeddings, labels)
    loss.proxies.data.copy_(backup)
    loss.digest = ShardedPotentialFieldLoss(4, 3, proxies_per_class=2, group=group).digest
    return message, loss(*good).item()


def shard_of_stored_state(group, whole, options):
    """The proxies of a rank that loads its part of a whole state, and what is gathered from all of them."""
    from pfml.distributed import gather_rows, gather_state, shard_state

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    loss = ShardedPotentialFieldLoss(5, 4, proxies_per_class=3, alpha=2.0, group=group, **options)
    loss.load_state_dict(shard_state(whole, rank=rank, world=world))
    moments = gather_rows(loss, 2 * loss.proxies)
    gathered = gather_state(loss)
    assert (rank == 0) == (gathered is not None) == (moments is not None)
    return loss.proxies.detach().clone(), gathered, moments


def refusals_of_states(group, whole):
    """Messages of states that do not fit."""
    from pfml.distributed import gather_rows, shard_state

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    loss = ShardedPotentialFieldLoss(5, 4, proxies_per_class=3, alpha=2.0, group=group)
    before = loss.proxies.detach().clone()
    other_rank = shard_state(whole, rank=(rank + 1) % world, world=world)
    other_alpha = ShardedPotentialFieldLoss(5, 4, proxies_per_class=3, alpha=4.0, group=group).state_dict()
    broken = {**shard_state(whole, rank=rank, world=world), "_extra_state": torch.zeros(3, dtype=torch.uint8)}
    messages = [message_of(loss.load_state_dict, state) for state in (other_rank, whole, other_alpha, broken)]
    messages.append(message_of(gather_rows, loss, loss.proxies[1:] if rank == 1 else loss.proxies))
    assert torch.equal(before, loss.proxies.detach())
    own = loss.state_dict()
    loss.load_state_dict(own)
    return messages


def forward_without_rank_1(group):
    """What a rank is told whose peer does not come."""
    loss = ShardedPotentialFieldLoss(4, 3, proxies_per_class=2, group=group)
    return message_of(loss, torch.eye(3), torch.arange(3)) if dist.get_rank(group) == 0 else None
