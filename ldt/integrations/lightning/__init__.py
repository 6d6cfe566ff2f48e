"""A pipeline as a LightningModule, on the edge: ``pip install 'ldt-torch[lightning]'``."""

from ldt.integrations.lightning.module import PipelineModule

__all__ = ["PipelineModule"]
