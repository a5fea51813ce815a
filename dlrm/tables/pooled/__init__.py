"""A sharded embedding-bag collection of fixed shapes."""
