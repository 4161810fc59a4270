"""The conformance table: every collective, over element types, shapes, memory layouts and groups, with its reference."""
