"""The benchmark suite: ``python -m iris_pg.bench``."""
