"""Makes training data: filters, deduplicates and tokenises documents into token shards."""
