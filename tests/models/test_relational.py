"""The relational layer against the equations of DRML in loops, and an embedder that has one."""

import pytest
import torch

from pfml.models import create_embedder, load_embedder
from pfml.models.relational import RelationalLayer

F, D, K = 12, 8, 4


def make():
    """A layer away from its start, where relations do nothing yet."""
    torch.manual_seed(0)
    layer = RelationalLayer(F, D, K).double()
    with torch.no_grad():
        layer.integrate.weight.add_(0.5 * torch.randn_like(layer.integrate.weight))
        layer.score.bias.fill_(0.3)
    return layer


def literal(layer, features):
    rows = []
    for row in features:
        groups = [row[k * 3 : k * 3 + 3] for k in range(K)]
        fixed = [group.detach() for group in groups]
        nodes = [layer.nodes_of[k](groups[k]) for k in range(K)]
        nodes = [node / node.norm() for node in nodes]
        scores = [
            [torch.relu(layer.score(layer.sources[k](fixed[k]) - layer.targets[m](fixed[m])))[0] for m in range(K)]
            for k in range(K)
        ]
        outs = []
        for m in range(K):
            total = sum(scores[k][m] for k in range(K))
            related = sum(scores[k][m] / total * nodes[k] for k in range(K)) if total > 0 else 0 * nodes[m]
            outs.append(layer.integrate(torch.cat([nodes[m], related])))
        rows.append(torch.cat(outs))
    return torch.stack(rows)


def test_it_is_the_published_layer():
    layer = make()
    features = torch.randn(5, F, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(5, D, dtype=torch.float64)
    mine, theirs = layer(features), literal(layer, features)
    torch.testing.assert_close(mine, theirs)
    inputs = [features, *layer.parameters()]
    gradients = [torch.autograd.grad((each * weights).sum(), inputs) for each in (mine, theirs)]
    for one, other in zip(*gradients, strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other)


def test_it_starts_as_unit_vectors_side_by_side():
    layer = RelationalLayer(F, D, K)
    features = torch.randn(3, F)
    nodes = layer.nodes(features)
    torch.testing.assert_close(nodes.norm(dim=2), torch.ones(3, K))
    torch.testing.assert_close(layer(features), nodes.flatten(1))


def test_an_embedder_with_relations_is_saved_and_loaded(tmp_path):
    embedder = create_embedder("convnet", embedding_dim=16, relations=4).eval()
    images = torch.rand(3, 3, 32, 32)
    points = embedder(images)
    torch.testing.assert_close(points.norm(dim=1), torch.ones(3))
    embedder.save(tmp_path)
    assert torch.equal(load_embedder(tmp_path)(images), points)
    assert {id(each) for each in embedder.head_parameters()} == {id(each) for each in embedder.head.parameters()}
    assert embedder.head.nodes(embedder.features(images)).shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"relations": 5, "embedding_dim": 15}, "relations must divide the 96 features, got 5"),
        ({"relations": 4, "embedding_dim": 15}, "relations must divide the 15 dimensions of the embedding, got 4"),
        ({"relations": 4, "embedding_dim": None}, "relations must be an integer >= 1, and 1 without an embedding_dim"),
        ({"relations": 0}, "relations must be an integer >= 1, got 0"),
    ],
)
def test_bad_relations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        create_embedder("convnet", **options)
