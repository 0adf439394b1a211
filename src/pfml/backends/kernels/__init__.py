"""The field's Triton kernels, which `pfml.backends.fused` launches; importing them needs the package triton.

    points         prepare            positions, in a high and a low half-precision part and quantized; labels and kinds
    tiles          screen             which tiles may hold a pair of different classes within reach, by integers
                   index              a list of these tiles
                   interact           their pairs, at float32 accuracy: energies, and how strongly they pull
                   gather             for each charge, the energies and forces of its tiles
    differences    interact_closely   the tiles with pairs so close that a product has lost their digits
                   finish             the pairs of each class; gradients at positions -> at the points as given
    laws           GPU_LAWS           the decay laws that the kernels know; a new one is a row of this table

Every row of every result has one owner, which adds up in a fixed order. So there are no atomic additions, and equal
inputs give equal bits.

What travels together is one named tuple: `SplitPoints` (rows and columns), `TileList`, `TilePulls`, `SourceWeights`,
`GivenPoints` and `PairNumbers`. Triton flattens tuples into plain arguments, so they cost nothing on the device.
"""
