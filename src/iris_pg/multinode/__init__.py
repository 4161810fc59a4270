"""Groups that span hosts: iris within each host, an existing engine between them."""
