"""Checks of a part of a sharded loss: its batch, its proxies, its stored state, and that it fits the other parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pfml.distributed.peers import Peers
from pfml.losses.checks import check_batch, deferred_checks
from pfml.losses.potential_field import require_same

if TYPE_CHECKING:
    from pfml.distributed.sharded_loss import ShardedPotentialFieldLoss

__all__ = [
    "agreed_batch",
    "check_options",
    "check_shard",
    "checked_batch",
    "extra_state",
    "extra_state_of",
    "require_equal",
]

#: The types that a field is computed in; ranks tell each other the place in this list.
_TYPES = (torch.float32, torch.float64)


def checked_batch(loss: ShardedPotentialFieldLoss, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, torch.dtype]:
    """`labels` as int64 on the proxies' device, and the type to compute in, after all checks of values and shapes."""
    no_proxies = loss.proxies.new_empty(loss.num_classes, 0, loss.embedding_dim)
    # A check that waits for a later look would let this rank go on where others stop: it is looked at here.
    with deferred_checks() as checks:
        labels = check_batch(embeddings, labels, no_proxies)
    for check in checks:
        if check.is_worth_a_look.item():
            check.explain()
    if not torch.isfinite(loss.proxies.detach().sum(dtype=torch.float64)):
        bad = ~torch.isfinite(loss.proxies.detach()).all(dim=1)
        classes = loss.proxy_labels[bad].unique().tolist()
        shown = ", ".join(map(str, classes[:10])) + (", ..." if len(classes) > 10 else "")
        raise ValueError(f"proxies must be finite, got NaN or Inf in {len(classes)} classes: {shown}")
    return labels, torch.promote_types(torch.promote_types(embeddings.dtype, loss.proxies.dtype), torch.float32)


def agreed_batch(
    loss: ShardedPotentialFieldLoss, embeddings: Tensor, labels: Tensor
) -> tuple[Tensor, torch.dtype, list[int], bool]:
    """Labels, the type to compute in, all ranks' batch sizes, and whether any rank wants a gradient."""
    chooses_samples = bool(loss.training and loss.trust)  # with messages that a rank in the other mode would not send
    error, record = None, [0, 0, 0, 2 * loss.digest + chooses_samples]
    try:
        if not loss.proxies_ready:
            raise RuntimeError(f"proxy_init={loss.proxy_init!r} needs loss.initialize_proxies before the first use")
        labels, wide = checked_batch(loss, embeddings, labels)
        wants = torch.is_grad_enabled() and (embeddings.requires_grad or loss.proxies.requires_grad)
        record[:3] = len(embeddings), _TYPES.index(wide), wants
    except Exception as caught:
        error = caught
    batch_sizes, types, wanted, digests = map(list, zip(*loss.peers.records(record, error), strict=True))
    if len(set(digests)) > 1:
        raise RuntimeError(
            "all ranks must call the same loss at the same time, "
            "got losses of other hyper-parameters, or some in training mode and others not"
        )
    if len(set(types)) > 1:
        names = [str(_TYPES[index]) for index in types]
        raise TypeError(f"embeddings and proxies must give one type on all ranks, got {names} by rank")
    return labels, wide, batch_sizes, any(wanted)


def check_options(proxies_per_class: Any, backend: str, network_gradients: str, choices: Iterable[str]) -> None:
    """Raise unless these options of a sharded loss, which a whole one lacks or has others of, can be."""
    if not isinstance(proxies_per_class, int) or isinstance(proxies_per_class, bool) or proxies_per_class < 0:
        raise ValueError(f"proxies_per_class must be an integer >= 0, got {proxies_per_class!r}")
    if backend not in ("auto", "tiled"):
        raise ValueError(f"backend of a sharded loss must be 'auto' or 'tiled', got {backend!r}")
    if network_gradients not in choices:
        raise ValueError(f"network_gradients must be one of {tuple(choices)}, got {network_gradients!r}")


def require_equal(peers: Peers, settings: dict[str, Any]) -> int:
    """A digest of the settings; all ranks raise the same error unless it is the same everywhere."""
    text = json.dumps(settings, sort_keys=True)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    if len({number for (number,) in peers.records([digest])}) > 1:
        by_rank = [json.loads(text) for text in peers.texts(text)]
        all_names = dict.fromkeys(name for settings in by_rank for name in settings)  # some are there only if set
        names = [name for name in all_names if any(other.get(name) != by_rank[0].get(name) for other in by_rank)]
        differing = "; ".join(f"{name}: {[other.get(name) for other in by_rank]} by rank" for name in names)
        raise ValueError(f"a sharded loss must have the same hyper-parameters on all ranks, got {differing}")
    return digest


def extra_state(**state: Any) -> Tensor:
    """JSON in a byte tensor, so that a state_dict holds tensors only."""
    return torch.frombuffer(bytearray(json.dumps(state, sort_keys=True).encode()), dtype=torch.uint8)


def extra_state_of(state_dict: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """What `extra_state` stored, or an error that says that it is missing or broken."""
    try:
        stored = json.loads(bytes(state_dict[prefix + "_extra_state"].cpu().numpy().tobytes()))
        return {"hyperparameters": stored["hyperparameters"], "proxies_ready": stored["proxies_ready"], **stored}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("the stored hyper-parameters of the potential field loss are missing or broken") from None


def check_shard(loss: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse a state_dict of a different loss, or of another part, before anything of it is loaded."""
    stored = extra_state_of(state_dict, prefix)
    require_same(stored["hyperparameters"], loss.hyperparameters())
    here = {"rank": loss.peers.rank, "world": loss.peers.world}
    if stored.get("shard") != here:
        raise ValueError(
            f"the stored part of the loss must be of rank {here['rank']} of {here['world']}, "
            f"got {stored.get('shard')}: cut it from a whole state with pfml.distributed.shard_state"
        )
