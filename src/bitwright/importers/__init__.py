"""Importers: read configurations, mappers and traces of other systems."""
