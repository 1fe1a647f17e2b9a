"""Every setting, once: its definition, where its value comes from, its help."""
