"""Preparation of corpora: filters, deduplication, conversations, downloads from the hub, and writers."""
