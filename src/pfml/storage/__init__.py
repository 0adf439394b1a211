"""What lasts: files that are whole or absent, locks, manifests, bundles of tensors, shards of vectors."""
