"""Three clusters that a loss with proxies must tell apart."""

import torch


def check_three_clusters(loss, *, falls_to, steps=120):
    """Train random points with `loss`: each must find its class's proxies, and the loss fall to that share."""
    labels = torch.arange(30) % 3
    points = torch.randn(30, loss.proxy_points().shape[2]).requires_grad_()
    optimizer = torch.optim.Adam([{"params": [points], "lr": 0.02}, *loss.param_groups(lr=0.05)])

    def accuracy():
        proxies = loss.proxy_points()
        cosines = torch.nn.functional.normalize(points.detach()) @ proxies.flatten(0, 1).T
        return (cosines.argmax(dim=1) // proxies.shape[1] == labels).float().mean().item()

    first, first_accuracy = loss(points, labels).item(), accuracy()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(points, labels).backward()
        optimizer.step()
    assert first_accuracy < 0.8
    assert accuracy() == 1
    assert loss(points, labels).item() < falls_to * first
