"""ampmem in IPython and Jupyter: ``%load_ext ampmem`` gives ``%%ampmem`` and ``%ampmem``."""
