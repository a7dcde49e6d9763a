SELECT EXISTS (SELECT FROM "kfs_credentials_pause")
