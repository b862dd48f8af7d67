"""From a recipe to a federation between machines: folders, keys, certificates, processes."""
