"""Training on large clusters: topologies, meshes, compiling for machines you do not have."""
