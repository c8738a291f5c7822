"""Every untrusted byte enters here, and every file that must survive a crash is written here."""
