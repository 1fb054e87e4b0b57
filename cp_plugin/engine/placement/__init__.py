"""Layouts built for a pack of documents."""
