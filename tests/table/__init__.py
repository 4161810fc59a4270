"""The conformance table: every collective over element types, shapes, layouts and groups, with its reference."""
