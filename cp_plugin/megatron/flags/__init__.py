"""The plugin's command-line flags."""
