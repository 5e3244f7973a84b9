"""What turns a model on the meta device into this rank's part of it. One file a transform; none renames."""
