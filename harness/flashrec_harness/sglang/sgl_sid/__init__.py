"""External model package for SGLang (``SGLANG_EXTERNAL_MODEL_PACKAGE=sgl_sid``): search within catalogs."""
