"""The margin loss of triplets in plain Python, and a record of the triplets that a loss draws."""

import torch


def literal_margin(points, labels, triplets, beta, margin):
    """The sum over triplets, divided by the number of those in which anything is too far or too near."""
    total, acting = 0.0, 0
    for anchor, positive, negative, exists in triplets:
        if not exists:
            continue
        own = beta[labels[anchor]]
        too_far = torch.relu(((points[anchor] - points[positive]).square().sum() + 1e-8).sqrt() - own + margin)
        too_near = torch.relu(own - ((points[anchor] - points[negative]).square().sum() + 1e-8).sqrt() + margin)
        total, acting = total + too_far + too_near, acting + int(too_far + too_near > 0)
    return total / max(acting, 1)


def rows(triplets):
    """(anchor, positive, negative, whether it exists) of each."""
    columns = triplets.anchors, triplets.positives, triplets.negatives, triplets.exist
    return [tuple(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def record_triplets(monkeypatch, module):
    """A list that gets the rows of all triplets which losses of `module` draw from now on."""
    drawn = []

    def recording(draw):
        def recorded(*args, **options):
            triplets = draw(*args, **options)
            drawn.append(rows(triplets))
            return triplets

        return recorded

    for name in ("distance_weighted_triplets", "within_class_triplets"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, recording(getattr(module, name)))
    return drawn
