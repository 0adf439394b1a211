"""Published losses that others are made of, in loops over scalars; tensors only so that autograd can follow."""

import torch


def proxy_anchor(points, labels, proxies, *, scale, margin):
    """Proxy Anchor of points (B, D) with labels (B,) and proxies (C, D)."""
    labels = labels.tolist()
    pull, push = 0.0, 0.0
    for c, proxy in enumerate(proxies):
        same, other = 1.0, 1.0
        for x, label in zip(points, labels, strict=True):
            s = (x @ proxy) / (x.norm() * proxy.norm())
            if label == c:
                same = same + torch.exp(-scale * (s - margin))
            else:
                other = other + torch.exp(scale * (s + margin))
        pull = pull + torch.log(torch.as_tensor(same))
        push = push + torch.log(torch.as_tensor(other))
    return pull / len(set(labels)) + push / len(proxies)


def kept_pairs(points, labels, epsilon):
    """For each sample the positives and the negatives that the miner of multi-similarity keeps, as lists."""
    points, labels, kept = points.detach(), labels.tolist(), []
    cosine = lambda i, j: float(points[i] @ points[j] / (points[i].norm() * points[j].norm()))  # noqa: E731
    everyone = range(len(labels))
    for a in everyone:
        positives = [j for j in everyone if j != a and labels[j] == labels[a]]
        negatives = [j for j in everyone if labels[j] != labels[a]]
        if not positives or not negatives:
            kept.append(([], []))
            continue
        nearest, farthest = max(cosine(a, n) for n in negatives), min(cosine(a, p) for p in positives)
        kept.append(([p for p in positives if cosine(a, p) - epsilon < nearest],
                     [n for n in negatives if cosine(a, n) + epsilon > farthest]))  # fmt: skip
    return kept


def multi_similarity(cosine, pairs, *, alpha, beta, base):
    """The terms of the anchors, a list: `cosine(a, j)` and what `kept_pairs` keeps."""
    terms = []
    for a, (positives, negatives) in enumerate(pairs):
        near = 1.0 + sum(torch.exp(-alpha * (cosine(a, p) - base)) for p in positives)
        far = 1.0 + sum(torch.exp(beta * (cosine(a, n) - base)) for n in negatives)
        terms.append(torch.log(torch.as_tensor(near)) / alpha + torch.log(torch.as_tensor(far)) / beta)
    return terms
