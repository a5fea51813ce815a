"""The static pipeline for models with unpooled embedding rows."""
